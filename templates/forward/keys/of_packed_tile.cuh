__device__ __forceinline__ Blocks blocks_of_tile(const Params& params, int m_block) {
  const int queries = params.tile_queries.value;
  return blocks_of(params, m_block * queries, m_block * queries + queries - 1);
}
