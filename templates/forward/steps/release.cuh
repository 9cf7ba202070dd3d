  // One arrival per warp, since wgmma completes per warp.
  __device__ __forceinline__ void release(Barrier& empty) {
    if (lane() == 0) {
      empty.arrive();
    }
  }
