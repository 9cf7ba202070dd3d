  // P of a block of scores, with these offsets, and its row sums.
  __device__ __forceinline__ void exponentiate(const float (&s)[kBlockN / 2], float (&p)[kBlockN / 2], float (&part)[2],
                                               const BlockScales& block, const float (&offset)[2]) const {
    Chains chains;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      exponentiate_group<kShare>(s + g * kShare, p + g * kShare, factor_of(block[g]), offset, chains, g == 0);
    }
    part[0] = sum_of(chains, 0);
    part[1] = sum_of(chains, 1);
  }
