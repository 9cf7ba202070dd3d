// A row's sink is one more logit without a value. It joins the sum of P, which is relative to a reference in log2 units:
// both to the larger one, so that neither grows too large. What O is to be multiplied by, and the log-sum-exp.
__device__ __forceinline__ void add_sink(float sink, float reference, float sum, float& inverse, float& lse) {
  const float above = sink * 1.44269504089f - reference;
  const bool larger = above > 0.f;
  const float weight = exp2_approx(-fabsf(above));  // of the smaller one
  const float both = larger ? fmaf(sum, weight, 1.f) : sum + weight;
  inverse = reciprocal_approx(both) * (larger ? weight : 1.f);
  const float rest = log2_approx(both);
  lse = larger ? fmaf(rest, 0.69314718056f, sink) : (reference + rest) * 0.69314718056f;
}
