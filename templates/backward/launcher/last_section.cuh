  // The last has tiles for two rounds and a half, so that long ones do not begin last; of groups, which read the same for longer, for
  // as many as the L2 cache holds what they all read, and for one round at least.
  const int64_t all_rounds = ceil_div(5 * kMultiprocessors / 2, tile_blocks * std::max(1, n_blocks));
  const int64_t round = ceil_div(kMultiprocessors, tile_blocks * std::max(1, n_blocks));
  const bool held = params.group > 1 && flat_heads > all_rounds;
  const int64_t most = held ? kHeldBytes / std::max<int64_t>(1, head_bytes) : flat_heads;
  const int64_t last = std::min({flat_heads, all_rounds, std::max(round, most)});
