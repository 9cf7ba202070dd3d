// Element (k, n) of a Hadamard matrix of 16 columns.
__device__ __forceinline__ float hadamard(int k, int n) { return __popc(k & n) % 2 ? -1.0f : 1.0f; }
