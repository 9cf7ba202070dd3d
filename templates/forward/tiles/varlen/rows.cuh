  __device__ __forceinline__ int tiles_of_head() const { return ceil_div(sequence.seqlen_q, kBlockM); }

  __device__ __forceinline__ static int first_row_of(int m_block) { return m_block * kBlockM; }
