// A row's sink follows its splits: one more, of which the log-sum-exp is the sink, and the output is nothing. The base
// of sums is the largest log-sum-exp so far; `old` is what sums of P V are to be multiplied by.
__device__ __forceinline__ void combine_sink(float sink, float& base, float& sum, float& old) {
  const float weight = weigh(sink, base);
  old = old_weight(weight);
  sum = accumulate(sum, 1.0f, old, own_weight(weight));
  base = fmaxf(base, sink);
}
