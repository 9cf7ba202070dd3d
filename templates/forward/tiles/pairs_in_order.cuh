// Two tiles of one head, one for each block of a cluster. Where a head has an odd number, the last one is
// past the end: its block makes every step with the other, and TMA clips what it stores.
__device__ __forceinline__ Tile tile_at(const Params& params, int index) {
  const int flat_head = params.m_pairs.divide(index);
  const int m_block = (index - flat_head * params.m_pairs.value) * kCluster + blockIdx.x % kCluster;
  return tile_of(params, flat_head, m_block);
}
