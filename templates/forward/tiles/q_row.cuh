  // Where a row of Q is in global memory.
  __device__ __forceinline__ const Element* q_row(const Tile& tile, int row) const {
    return params.q_rows + tile.batch * params.q_stride_batch + tile.head * params.q_stride_head +
           row * params.q_stride_seq;
  }
