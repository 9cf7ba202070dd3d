__device__ __forceinline__ int lane() { return threadIdx.x % 32; }
