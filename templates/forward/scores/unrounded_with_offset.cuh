  // What makes P relative to the row max itself, whose product with the scale was rounded, and as large as it is.
  __device__ __forceinline__ float unrounded(int r) const {
    return max[r] == kNoScore ? 1.f : exp2_approx(far ? -kPOffset : __fmaf_rn(-max[r], scale, reference(r)));
  }
