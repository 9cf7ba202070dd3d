  // P of a block of scores, in place, relative to the row maxima.
  __device__ __forceinline__ void exponentiate(float (&s)[kBlockN / 2]) {
    const float offset[2] = {offset_of(0), offset_of(1)};
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) {
      s[i] = exp2_approx(fmaf(s[i], scale, offset[row_of(i)]));
    }
  }
