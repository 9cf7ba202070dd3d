  params.alone = most_splits == 1;
  const int64_t grid = std::min<int64_t>(units, int64_t(multiprocessors) * kBlocks);
