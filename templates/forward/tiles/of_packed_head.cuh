// Heads that share a tile's rows count as one.
__device__ __forceinline__ Tile tile_of(const Params& params, int flat_head, int m_block) {
  Tile tile;
  tile.first_row = m_block * params.tile_queries.value;
  tile.batch = params.heads.divide(flat_head);
  tile.head = flat_head - tile.batch * params.heads.value;
  tile.kv_head = params.heads_per_kv_head.divide(tile.head);
  tile.blocks = blocks_of_tile(params, m_block);
  return tile;
}
