  // What makes P relative to the row max itself, whose product with the scale was rounded.
  __device__ __forceinline__ float unrounded(int r) const {
    return far || max[r] == kNoScore ? 1.f : exp2_approx(__fmaf_rn(-max[r], scale, reference(r)));
  }
