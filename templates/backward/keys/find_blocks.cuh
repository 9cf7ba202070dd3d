// The blocks of rows that see some of the keys from first_key on, which thread blocks of a cluster share; of the full ones
// every row sees all of a thread block's own.
__device__ __forceinline__ void find_blocks(Tile& tile, const Lengths& lengths, int first_key, const int& m_blocks) {
  const int first_row = first_row_past(lengths, first_key);
  tile.first = first_row < lengths.seqlen_q ? first_row / kBlockM : m_blocks;
  tile.full_first = ceil_div(first_row_past(lengths, tile.first_key + kBlockN - 1), kBlockM);
  find_last(tile, lengths, first_key, m_blocks);
}
