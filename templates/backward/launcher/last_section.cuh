  // The last has tiles for two rounds and a half, so that long ones do not begin last; where tiles are many, only if the L2 cache holds
  // all that they read, but for one round at least.
  const int64_t all_rounds = ceil_div(5 * kMultiprocessors / 2, tile_blocks * std::max(1, n_blocks));
  const int64_t round = ceil_div(kMultiprocessors, tile_blocks * std::max(1, n_blocks));
  const int64_t held = n_blocks > 8 ? kHeldBytes / std::max<int64_t>(1, head_bytes) : all_rounds;
  const int64_t last = std::min(flat_heads, std::max(round, std::min(all_rounds, held)));
