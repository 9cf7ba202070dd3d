// Which rows a thread block of the last kernel has.
__device__ __forceinline__ int place() { return blockIdx.x; }
