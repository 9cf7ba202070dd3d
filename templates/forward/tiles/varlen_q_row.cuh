  // Where a row of Q is in global memory.
  __device__ __forceinline__ const Element* q_row(const Tile& tile, int row) const {
    const int64_t first = tile.sequence.end_q - tile.sequence.seqlen_q;
    return params.q_rows + tile.head * params.q_stride_head + (first + row) * params.q_stride_seq;
  }
