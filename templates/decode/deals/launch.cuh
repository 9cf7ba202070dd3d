  // How many splits a sequence may have: what there is of keys is known here.
  const int blocks = blocks_of(params.seqlen_k, kBlockN);
  const int most_splits =
      blocks <= kMostBlocks ? std::min(blocks, 1) : std::min(kNumSplits, blocks_of(blocks, params.least_blocks));
  const int64_t units = int64_t(params.split_units) * a.batch * most_splits;
