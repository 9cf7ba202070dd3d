  // As many splits as take the least time: a round of units lasts as long as a split and what a unit costs beside it, and
  // all partial outputs are combined.
  int64_t least = INT64_MAX;
  for (int splits = std::clamp(int(ceil_div(a.seqlen_k, kSplitKeys)), 1, kNumSplits); splits <= kNumSplits; ++splits) {
    const int split_blocks = std::max(1, int(ceil_div(blocks, splits)));
    const int64_t units = units_of(split_blocks);
    const int64_t cost = ceil_div(units, kSmCount) * (kCostUnit * split_blocks + kUnitCost) + units * kCombineCost / kSmCount;
    if (cost < least) {
      least = cost;
      params.split_blocks = split_blocks;
    }
  }
