  // Where a split's partial output of a row is.
  __device__ __forceinline__ int64_t partial(int batch, int split, int position, int head) const {
    return ((int64_t(batch) * kNumSplits + split) * seqlen_q + position) * heads + head;
  }
