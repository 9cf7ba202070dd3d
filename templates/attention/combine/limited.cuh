// What an output is, of a sum of P V and one over the sum of P. An average of V is no larger than V, but P was rounded
// and its sum was not.
__device__ __forceinline__ float average(const float& total, const float& inverse) {
  const float x = times(total, inverse);
  return fabsf(x) < INFINITY ? fminf(fmaxf(x, -kLargestOutput), kLargestOutput) : x;
}
