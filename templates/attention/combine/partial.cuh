  // Where a split's partial output of a row is.
  __device__ __forceinline__ int64_t partial(int batch, int split, int position, int head) const {
    return ((int64_t(batch) * kNumSplits + split) * seqlen_q + position) * heads + head;
  }

  // By how much one reference lies above another, in natural logarithm: that of a split which has seen nothing, or no number,
  // is so too. Large scores are subtracted before they are scaled: what is small of their difference is exact.
  __device__ __forceinline__ float rise(float before, float reference) const {
    return reference == -INFINITY ? -INFINITY : (reference - before) * scale;
  }
