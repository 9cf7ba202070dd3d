  params.heads = FastDivisor(packs);
