  // One arrival per warp, since wgmma completes per warp.
  __device__ __forceinline__ void arrive(Barrier& barrier) {
    if (lane() == 0) {
      barrier.arrive();
    }
  }
