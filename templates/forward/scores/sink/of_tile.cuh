  // The softmax of a tile before its first score but its rows' sink.
  __device__ __forceinline__ Softmax softmax_of(const Tile& tile) const {
    Softmax softmax = fresh_softmax();
    const float sink = params.sink(tile.head);
    softmax.begin_with(sink, 0, params.sink_factor);
    softmax.begin_with(sink, 1, params.sink_factor);
    return softmax;
  }
