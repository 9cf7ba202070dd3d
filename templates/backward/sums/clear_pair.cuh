// Sums of dQ begin at none.
__device__ __forceinline__ void clear(RowBlock& record) {
  if (threadIdx.x < kCluster) {
    record.added[threadIdx.x] = 0;
  }
}
