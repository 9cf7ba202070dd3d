  const int group = a.heads / a.kv_heads;
  const int tile_heads = std::min(group, kRows);
  const int tile_positions = std::clamp(kRows / group, 1, a.seqlen_q);
  const int head_tiles = blocks_of(group, tile_heads);
  const int row_tiles = head_tiles * blocks_of(a.seqlen_q, tile_positions);
  params.group = group;
  params.tile_positions = tile_positions;
  params.tile_heads = FastDivisor(tile_heads);
  params.q_bytes = tile_heads * tile_positions * kHeadDimPadded * int(sizeof(Element));
  params.split_units = row_tiles * a.kv_heads;
  params.row_tiles = FastDivisor(row_tiles);
  params.head_tiles = FastDivisor(head_tiles);
  // No sequence has more splits than it has blocks of keys: what there is of either is known here.
  const int64_t units = int64_t(params.split_units) * a.batch * std::min(kNumSplits, blocks_of(params.seqlen_k, kBlockN));
