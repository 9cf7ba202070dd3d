  // Gives a buffer back to those who fill it in both blocks of the cluster: an arrival per warp at the barriers of both.
  __device__ __forceinline__ void release(Barrier& empty) {
    __syncwarp();
    if (lane() < kCluster) {
      empty.arrive(lane());
    }
  }

