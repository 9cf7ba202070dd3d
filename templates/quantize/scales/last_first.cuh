// Which rows a thread block of the last kernel has. What was read last comes first: much of it is still in the L2 cache.
__device__ __forceinline__ int place() { return gridDim.x - 1 - blockIdx.x; }
