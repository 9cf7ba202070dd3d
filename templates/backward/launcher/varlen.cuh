  // How many blocks there are the GPU finds out: there is a thread block for each that there may be.
  const int m_slots = a.total_q ? int(ceil_div(a.total_q, kBlockM)) + a.offsets : 0;
  const int kept = most_kept(a);
  const int64_t tiles = int64_t(key_slots(a) + kept) * a.kv_heads;
  if (m_slots == 0 && tiles == 0) {
    return kOk;
  }
  params.m_slots = m_slots;
  params.most_tiles = key_slots(a) + kept;
  params.most_kept = kept;
  params.key_blocks = reinterpret_cast<KeyBlock*>(params.row_blocks + int64_t(a.heads) * m_slots);
  params.list = reinterpret_cast<TileList*>(params.key_blocks + int64_t(kept) * a.kv_heads * kCluster);
  params.listed = reinterpret_cast<ListedTile*>(params.list + 1);
  // Heads come in sections whose rows fit their share of the L2 cache.
  const int64_t head_bytes = int64_t(a.total_q) * params.group * ((kHeadDim + kHeadDimV) * sizeof(Element) + kHeadDim * sizeof(float));
  params.section_heads = int(std::clamp<int64_t>(kL2Share / std::max<int64_t>(1, head_bytes), 1, std::max(1, a.kv_heads)));
  const int grid = int(tiles) * kCluster;
