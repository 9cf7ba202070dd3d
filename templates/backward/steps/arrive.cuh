  // One arrival per warp, since wgmma completes per warp, for what all of its lanes have read and written.
  __device__ __forceinline__ void arrive(Barrier& barrier) {
    __syncwarp();
    if (lane() == 0) {
      barrier.arrive();
    }
  }

