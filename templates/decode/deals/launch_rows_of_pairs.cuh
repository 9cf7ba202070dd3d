  const int group = a.heads / a.kv_heads;
  const int tile_heads = std::min(group, kOwnRows);
  const int tile_positions = std::clamp(kOwnRows / group, 1, a.seqlen_q);
  const int head_tiles = blocks_of(group, tile_heads);
  const int row_tiles = head_tiles * blocks_of(a.seqlen_q, tile_positions);
  params.group = group;
  params.tile_positions = tile_positions;
  params.tile_heads = FastDivisor(tile_heads);
  params.least_blocks = std::clamp(group / kHeadsOfBlock, 1, kLongestLeast);
  params.q_bytes = kKvHeads * tile_heads * tile_positions * kHeadDimPadded * int(sizeof(Element));
  // Units count KV heads that go together; the last may lack some, which TMA finds outside of the tensors.
  params.kv_heads = blocks_of(a.kv_heads, kKvHeads);
  params.kv_heads_divisor = FastDivisor(params.kv_heads);
  params.split_units = row_tiles * params.kv_heads;
  // Whether two heads are a row of whole lines.
  params.adjacent = a.kv_heads % kKvHeads == 0 && a.k_stride_head == kHeadDim && a.v_stride_head == kHeadDimV;
  const int in_row = params.adjacent ? kKvHeads : 1;  // heads
  params.row_tiles = FastDivisor(row_tiles);
  params.head_tiles = FastDivisor(head_tiles);
