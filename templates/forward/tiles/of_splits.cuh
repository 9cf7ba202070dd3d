// Tiles of a split of one KV head follow each other, heads fastest: who shares K and V loads them at the same time. Split
// follows split, so that those come last of which tiles see the least, if any do.
__device__ __forceinline__ Tile tile_at(const Params& params, int index) {
  Tile tile;
  tile.split = params.split_tiles.divide(index);
  const int of_split = index - tile.split * params.split_tiles.value;
  const int flat_kv_head = params.kv_head_tiles.divide(of_split);
  const int of_kv_head = of_split - flat_kv_head * params.kv_head_tiles.value;
  const int m_block = params.heads_per_kv_head.divide(of_kv_head);
  tile.first_row = m_block * kBlockM;
  tile.batch = params.kv_heads.divide(flat_kv_head);
  tile.kv_head = flat_kv_head - tile.batch * params.kv_heads.value;
  tile.head = (tile.kv_head - m_block) * params.heads_per_kv_head.value + of_kv_head;
  tile.blocks = within(params, tile.split, blocks_of_tile(params, m_block));
  return tile;
}
