// Who takes tiles: clusters, two at a time.
__device__ __forceinline__ int taker() { return blockIdx.x / kCluster; }
__device__ __forceinline__ int takers() { return gridDim.x / kCluster; }
