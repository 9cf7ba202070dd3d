  // By how much one reference lies above another, in natural logarithm: that of a split which has seen nothing, or no number,
  // is so too. Large scores are subtracted before they are scaled: what is small of their difference is exact.
  __device__ __forceinline__ float rise(float before, float reference) const {
    return reference == -INFINITY ? -INFINITY : (reference - before) * scale;
  }
