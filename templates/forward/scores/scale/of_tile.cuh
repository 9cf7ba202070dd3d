  // The softmax of rows before their first score, of which softmax_of(tile) knows the scale.
  __device__ __forceinline__ static Softmax fresh_softmax() { return {}; }
