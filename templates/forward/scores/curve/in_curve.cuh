  // Whether scores beyond the curve's end show, relative to these row maxima: above in the sums of P, and below they are
  // no part of it.
  __device__ __forceinline__ bool in_curve(const Params& params) const {
    return fminf(max[0], max[1]) >= params.curve_low && fmaxf(max[0], max[1]) <= params.curve_high && !far;
  }
