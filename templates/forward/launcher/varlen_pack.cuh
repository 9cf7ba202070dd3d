  // The most heads of a KV head that fill a warpgroup's rows but for one, or where those are one or two, but for a few:
  // they share a tile's rows, those of a query side by side.
  const int group = a.heads / a.kv_heads;
  int pack = 0;
  for (const int most_unused : {1, kMostUnused}) {
    if (pack < 3) {
      pack = std::min(group, kWarpgroupRows);
      while (group % pack != 0 || kWarpgroupRows % pack > most_unused) {
        --pack;
      }
    }
  }
