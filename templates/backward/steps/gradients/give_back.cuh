  // A buffer, to who fills it.
  __device__ __forceinline__ void give_back(Barrier& empty) { arrive(empty); }

