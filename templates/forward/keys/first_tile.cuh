  // The first tile of a head that sees so many blocks: all see the last key.
  __device__ __forceinline__ int first_with(int least) const {
    return ceil_div(sequence.seqlen_k, kBlockN) < least ? tiles_of_head() : 0;
  }
