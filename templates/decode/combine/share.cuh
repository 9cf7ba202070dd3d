  // Hands on what a row of a split is relative to, with its sum.
  __device__ __forceinline__ void store_share(int j, int64_t index, float total) {
    if (thread_row() == 0) {
      const Share share = share_of(reference[j], total);
      __stcg(params.shares + index, share);
    }
  }
