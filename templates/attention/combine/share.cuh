// Of a row in a split: x, the score that P is relative to; y, the sum of P.
using Share = float2;

// A row that has seen nothing has no such score, one of what is no number none that is a number.
__device__ __forceinline__ Share share_of(float reference, float sum) {
  return {sum > 0.0f ? reference : sum == 0.0f ? -INFINITY : sum, sum};
}
