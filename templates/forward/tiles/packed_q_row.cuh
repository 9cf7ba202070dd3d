  // Which head a row of the warpgroup's is of, and where it is in global memory.
  __device__ __forceinline__ int head_of(const Tile& tile, int row) const {
    return (tile.head - query_of(row)) * params.pack.value + row;
  }
  __device__ __forceinline__ const Element* q_row(const Tile& tile, int row) {
    return params.q_rows + tile.batch * params.q_stride_batch + head_of(tile, row) * params.q_stride_head +
           (first_row(tile) + query_of(row)) * params.q_stride_seq;
  }
