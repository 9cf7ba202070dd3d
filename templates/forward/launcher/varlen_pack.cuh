  // The most heads of a KV head that fill a warpgroup's rows but for a few: they share a tile's rows, those of a query
  // side by side.
  const int group = a.heads / a.kv_heads;
  int pack = std::min(group, kWarpgroupRows);
  while (group % pack != 0 || kWarpgroupRows % pack > kMostUnused) {
    --pack;
  }
