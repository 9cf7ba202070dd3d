  __device__ __forceinline__ RowBlock& row_block(int head, int slot) const {
    return row_blocks[head * m_slots + slot];  // no memory has room for more than an int counts
  }
