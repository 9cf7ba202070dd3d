__device__ __forceinline__ Blocks blocks_of_tile(const Lengths& lengths, int m_block) {
  return blocks_of(lengths, m_block * kBlockM, m_block * kBlockM + kBlockM - 1);
}
