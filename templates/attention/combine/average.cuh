// What an output is, of a sum of P V and one over the sum of P.
__device__ __forceinline__ float average(float total, float inverse) { return times(total, inverse); }
