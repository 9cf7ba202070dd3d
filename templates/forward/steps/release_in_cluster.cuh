  // One arrival per warp, since wgmma completes per warp, at the barriers of both blocks of the cluster.
  __device__ __forceinline__ void release(Barrier& empty) {
    if (lane() < kCluster) {
      empty.arrive(lane());
    }
  }
