  params.heads = packs;
