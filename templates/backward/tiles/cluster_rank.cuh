// Which of the cluster's blocks this is; the other has 1 less that.
__device__ __forceinline__ int cluster_rank() { return blockIdx.x % kCluster; }
