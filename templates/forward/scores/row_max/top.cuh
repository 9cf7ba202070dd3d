  // The row maxima with a block of scores.
  __device__ __forceinline__ void find_top(const float (&s)[kBlockN / 2], float (&top)[2]) const {
    float chains[4];
    find_largest<kBlockN / 2>(s, chains);
    top[0] = fmaxf(max[0], fmaxf(chains[0], chains[2]));
    top[1] = fmaxf(max[1], fmaxf(chains[1], chains[3]));
  }
