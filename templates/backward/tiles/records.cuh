  __device__ __forceinline__ RowBlock& row_block(int batch, int head, int m_block) const {
    const int flat_head = batch * heads + head;  // each has a record: no memory has room for more than an int counts
    return row_blocks[int64_t(flat_head) * m_blocks + m_block];
  }

  __device__ __forceinline__ KeyBlock* key_blocks_of(int batch, int kv_head, int n_block) const {
    const int flat_head = batch * kv_heads + kv_head;
    return key_blocks + (int64_t(flat_head) * kCluster * n_blocks + n_block) * shares;
  }
