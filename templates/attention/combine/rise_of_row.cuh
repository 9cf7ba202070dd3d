  // By how much one reference lies above another, in natural logarithm, with a row's own scale: that of a split which has
  // seen nothing, or no number, is so too. Large scores are subtracted before they are scaled: what is small of their
  // difference is exact.
  __device__ __forceinline__ static float rise(float before, float reference, float scale) {
    return reference == -INFINITY ? -INFINITY : (reference - before) * scale;
  }
