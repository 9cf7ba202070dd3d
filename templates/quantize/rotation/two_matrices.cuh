// Element (k, n) of a Hadamard matrix of 16 columns. Bit 2 of k tells two of them apart.
__device__ __forceinline__ float hadamard(int k, int n) {
  if ((k ^ n) & 4) {
    return 0.0f;
  }
  k &= ~4;
  return __popc(k & n) % 2 ? -1.0f : 1.0f;
}
