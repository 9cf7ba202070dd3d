  // Of the heads that share tiles, as if they were one.
  __device__ __forceinline__ int tiles_of_head() const {
    return params.tile_queries.divide(sequence.seqlen_q + params.tile_queries.value - 1);
  }

  __device__ __forceinline__ int first_row_of(int m_block) const { return m_block * params.tile_queries.value; }

  __device__ __forceinline__ Blocks blocks_of_tile(const Sequence& lengths, int m_block) const {
    const int first_row = first_row_of(m_block);
    return blocks_of(lengths, first_row, first_row + params.tile_queries.value - 1);
  }
