// Tiles of a split that see a key of it follow each other, heads fastest, and split follows split: so those come last that
// are fewest, and thread blocks, which take them in turns, have as many as each other.
__device__ __forceinline__ Tile tile_at(const Params& params, int index) {
  Tile tile;
  tile.split = 0;
  int m_block = params.first_seeing[0];
  while (index >= (params.m_blocks - m_block) * params.flat_heads.value) {
    index -= (params.m_blocks - m_block) * params.flat_heads.value;
    tile.split += 1;
    m_block = params.first_seeing[tile.split];
  }
  const int of_head = params.flat_heads.divide(index);
  const int flat_head = index - of_head * params.flat_heads.value;
  m_block += of_head;
  tile.first_row = m_block * kBlockM;
  tile.batch = params.heads_divisor.divide(flat_head);
  tile.head = flat_head - tile.batch * params.heads;
  tile.kv_head = params.heads_per_kv_head.divide(tile.head);
  tile.blocks = within(params, tile.split, blocks_of_tile(params, m_block));
  return tile;
}
