  // The row maxima with a block of scores. V's descales are part of the exponents: they are multiplied into P without
  // making it smaller.
  __device__ __forceinline__ void find_top(const float (&s)[kBlockN / 2], float (&top)[2], const BlockScales& block) const {
    top[0] = max[0];
    top[1] = max[1];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      float chains[4];
      find_largest<kShare>(s + g * kShare, chains);
      const float factor = factor_of(block[g].k);
      top[0] = fmaxf(top[0], fmaxf(chains[0], chains[2]) * factor + block[g].log2_v);
      top[1] = fmaxf(top[1], fmaxf(chains[1], chains[3]) * factor + block[g].log2_v);
    }
  }
