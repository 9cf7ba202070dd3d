// Of both tiles of a cluster, for which K and V are loaded together.
__device__ __forceinline__ Blocks blocks_of_tile(const Lengths& lengths, int m_block) {
  const int pair_row = m_block * kBlockM - m_block % kCluster * kBlockM;
  return blocks_of(lengths, pair_row, pair_row + kCluster * kBlockM - 1);
}
