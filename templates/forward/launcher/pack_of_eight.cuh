  // Heads of a KV head share a tile's rows, those of a query side by side: as many as make the fewest tiles, of those that
  // divide eight.
  const int group = a.heads / a.kv_heads;
  int pack = 0;
  int64_t fewest = INT64_MAX;  // tiles of a KV head
  for (int heads = 1; heads <= 8; heads *= 2) {
    const int64_t tiles = ceil_div(a.seqlen_q, kConsumers * (kWarpgroupRows / heads)) * (group / heads);
    if (group % heads == 0 && tiles < fewest) {
      pack = heads;
      fewest = tiles;
    }
  }
