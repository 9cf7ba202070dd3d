// The first of so many tiles of a head that sees so many blocks.
__device__ __forceinline__ int first_tile_with(const Sequence& sequence, int tiles, int least) {
  int low = 0, high = tiles;
  while (low < high) {
    const int m_block = (low + high) / 2;
    if (blocks_of_tile(sequence, m_block).last < least) {
      low = m_block + 1;
    } else {
      high = m_block;
    }
  }
  return low;
}
