  // Which of the heads that share a tile a row is of.
  __device__ __forceinline__ int head_of(const Tile& tile, int row) const {
    return tile.head * params.pack.value + row - query_of(row) * params.pack.value;
  }

  // The softmax of a tile before its first score but its rows' sinks.
  __device__ __forceinline__ Softmax softmax_of(const Tile& tile) const {
    Softmax softmax = fresh_softmax();
    softmax.begin_with(params.sink(head_of(tile, thread_row())), 0, params.sink_factor);
    softmax.begin_with(params.sink(head_of(tile, thread_row() + 8)), 1, params.sink_factor);
    return softmax;
  }
