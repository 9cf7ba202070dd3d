__device__ __forceinline__ Tile tile_at(const Params& params, int index) {
  const int flat_head = params.m_blocks.divide(index);  // neighbours share K and V
  const int m_block = index - flat_head * params.m_blocks.value;
  return tile_of(params, flat_head, m_block);
}
