  // Gives a buffer back to who fills it.
  __device__ __forceinline__ void release(Barrier& empty) { arrive(empty); }

