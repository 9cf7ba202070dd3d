  __device__ __forceinline__ void pass_on_turn() {
    barrier_arrive(kScheduler + (warpgroup + 1 == kConsumers ? 0 : warpgroup + 1), 2 * kWarpgroup);
  }
