  // How many splits a sequence may have: what its queries may see of keys, all of them together, is known here.
  const int blocks = blocks_of(int(std::min<int64_t>(params.seqlen_k, a.window_left + a.seqlen_q)), kBlockN);
