  // How many splits a sequence may have: what there is of keys is known here.
  const int blocks = blocks_of(params.seqlen_k, kBlockN);
