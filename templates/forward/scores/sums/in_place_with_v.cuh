  // P of a block of scores, in place, relative to the row maxima; its row sums are added up.
  __device__ __forceinline__ void exponentiate(float (&s)[kBlockN / 2], const BlockScales& block) {
    const float offset[2] = {offset_of(0), offset_of(1)};
    exponentiate(s, s, sum, block, offset);
  }
