// Sums of dQ begin at none, and so does what rows have of the gradient of a sink.
__device__ __forceinline__ void clear(RowBlock& record) {
  if (threadIdx.x < kCluster) {
    record.added[threadIdx.x] = 0;
  }
  if (threadIdx.x == 0) {
    record.dsink = 0;
  }
}
