  __device__ __forceinline__ Combined& combined_of(int batch, int position, int head) const {
    return combined[(batch * seqlen_q + position) * heads + head];  // there are fewer than 2^30 rows of splits
  }
