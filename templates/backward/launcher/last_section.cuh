  // The last has tiles for two rounds and a half at least, so that long ones do not begin last.
  const int64_t last = std::min<int64_t>(flat_heads, ceil_div(5 * kMultiprocessors / 2, tile_blocks * std::max(1, n_blocks)));
