// P of n scores with the same factor, relative to their rows' offsets; its sums begin with the first scores.
template <int n>
__device__ __forceinline__ void exponentiate_group(const float* s, float* p, float factor, const float (&offset)[2],
                                                   Chains& chains, bool first) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    p[i] = exp2_approx(fmaf(s[i], factor, offset[row_of(i)]));
    add_to(chains, i, p[i], first);
  }
}
