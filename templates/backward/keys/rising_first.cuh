// The first row whose keys begin after a key; seqlen_q if there is none.
__device__ __forceinline__ int first_row_beyond(const Lengths& lengths, int key) {
  return first_row_where(lengths, [&](const Keys& seen) { return seen.first > key; });
}

// The first block of keys that a block of rows sees.
__device__ __forceinline__ int first_tile_of(const Lengths& lengths, int m_block) {
  return seen_by(lengths, m_block * kBlockM).first / (kCluster * kBlockN);
}

// Where the blocks of rows end that see keys from first_key on, and those that see all of a thread block's.
__device__ __forceinline__ void find_last(Tile& tile, const Lengths& lengths, int first_key, const int&) {
  tile.last = ceil_div(first_row_beyond(lengths, first_key + kCluster * kBlockN - 1), kBlockM);
  tile.full_last = max(tile.full_first, first_row_beyond(lengths, tile.first_key) / kBlockM);
}
