// P of n products whose scores are a tanh, by a curve: exponents of 2 are x * (curve[0] + curve[1] x^2 + ...), relative
// to their rows' offsets. Products need no look: the curve rises for ever, so that one beyond its end shows in the sums.
template <int n>
__device__ __forceinline__ void exponentiate_curved(const float* s, float* p, const float (&curve)[kCurveTerms],
                                                    const float (&offset)[2], Chains& chains, bool first) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const float u = s[i] * s[i];
    float slope = curve[kCurveTerms - 1];
#pragma unroll
    for (int k = kCurveTerms - 2; k >= 0; --k) {
      slope = fmaf(u, slope, curve[k]);
    }
    p[i] = exp2_approx(fmaf(s[i], slope, offset[row_of(i)]));
    add_to(chains, i, p[i], first);
  }
}
