  // The first tile of a head that sees so many blocks.
  __device__ __forceinline__ int first_with(int least) const {
    int low = 0, high = tiles_of_head();
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
