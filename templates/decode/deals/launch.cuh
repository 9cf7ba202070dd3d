  const int most_splits =
      blocks <= kMostBlocks ? std::min(blocks, 1) : std::min(kNumSplits, blocks_of(blocks, params.least_blocks));
  const int64_t units = int64_t(params.split_units) * a.batch * most_splits;
