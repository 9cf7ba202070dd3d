  params.has_empty_tiles = a.seqlen_k == 0;
