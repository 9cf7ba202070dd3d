// How many blocks of keys a block of rows sees any of: so many parts its dQ has.
__device__ __forceinline__ int tiles_of(const Lengths& lengths, int m_block) {
  const int last_row = min((m_block + 1) * kBlockM, lengths.seqlen_q) - 1;
  return max(0, ceil_div(seen_by(lengths, last_row).last, kCluster * kBlockN) - first_tile_of(lengths, m_block));
}
