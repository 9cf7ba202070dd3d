// The half of a block's sums that this block of the cluster adds to, and the counter of what has been added there.
__device__ __forceinline__ float* sums_of(RowBlock& record) { return record.dq + cluster_rank() * kBlockM * kHeadDimPadded / kCluster; }
__device__ __forceinline__ uint32_t* counter_of(RowBlock& record) { return record.added + cluster_rank(); }
