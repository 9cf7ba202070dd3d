// The blocks of rows that see some of the keys from first_key on, which thread blocks of a cluster share; of the full ones
// every row sees all of a thread block's own. A warp asks each block whether these are among its tiles: so a tile has all blocks that
// count on it, and nobody waits for ever, whatever a call gives.
__device__ __forceinline__ void find_blocks(Tile& tile, const Lengths& lengths, int first_key, const int& m_blocks) {
  tile.full_first = ceil_div(first_row_past(lengths, tile.first_key + kBlockN - 1), kBlockM);
  find_last(tile, lengths, first_key, m_blocks);
  const int place = first_key / (kCluster * kBlockN);
  int first = m_blocks, last = 0;
#pragma unroll 4
  for (int m_block = lane(); m_block < m_blocks; m_block += 32) {
    const int number = place - first_tile_of(lengths, m_block);
    if (number >= 0 && number < tiles_of(lengths, m_block)) {
      first = min(first, m_block);
      last = m_block + 1;
    }
  }
  tile.first = -__reduce_max_sync(0xffffffff, -first);
  tile.last = __reduce_max_sync(0xffffffff, last);
}
