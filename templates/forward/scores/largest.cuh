// The largest of a thread's n scores in its two rows: two chains a row, r and r + 2, to hide latency.
template <int n>
__device__ __forceinline__ void find_largest(const float* s, float (&chains)[4]) {
#pragma unroll
  for (int chain = 0; chain < 4; ++chain) {
    chains[chain] = s[2 * chain];
  }
#pragma unroll
  for (int i = 0; i < n; i += 2) {
    const int chain = row_of(i) + i / 4 % 2 * 2;
    chains[chain] = fmaxf(chains[chain], fmaxf(s[i], s[i + 1]));
  }
}
