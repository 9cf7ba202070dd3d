  // The softmax of rows before their first score.
  __device__ __forceinline__ Softmax fresh_softmax() const { return {params.scale_log2}; }
