  const int group = a.heads / a.kv_heads;
  const int tile_heads = std::min(group, kRows);
  const int tile_positions = std::clamp(kRows / group, 1, a.seqlen_q);
  const int head_tiles = blocks_of(group, tile_heads);
  const int row_tiles = head_tiles * blocks_of(a.seqlen_q, tile_positions);
  params.group = group;
  params.tile_positions = tile_positions;
  params.tile_heads = FastDivisor(tile_heads);
  params.least_blocks = std::clamp(group / kHeadsOfBlock, 1, kLongestLeast);
  params.q_bytes = tile_heads * tile_positions * kHeadDimPadded * int(sizeof(Element));
  params.split_units = row_tiles * a.kv_heads;
  params.row_tiles = FastDivisor(row_tiles);
  params.head_tiles = FastDivisor(head_tiles);
  // How many splits a sequence may have: what there is of keys is known here.
  const int blocks = blocks_of(params.seqlen_k, kBlockN);
  const int most_splits =
      blocks <= kMostBlocks ? std::min(blocks, 1) : std::min(kNumSplits, blocks_of(blocks, params.least_blocks));
  const int64_t units = int64_t(params.split_units) * a.batch * most_splits;
