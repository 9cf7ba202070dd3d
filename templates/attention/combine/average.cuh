// What an output is, of a sum of P V and one over the sum of P.
__device__ __forceinline__ float average(const float& total, const float& inverse) { return times(total, inverse); }
