// Who takes tiles: thread blocks.
__device__ __forceinline__ int taker() { return blockIdx.x; }
__device__ __forceinline__ int takers() { return gridDim.x; }
