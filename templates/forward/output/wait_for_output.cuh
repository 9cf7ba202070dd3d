  uint32_t o_phase = 0;

  // The previous tile's O must have been stored from V's space, in all thread blocks that this one loads V for.
  __device__ __forceinline__ void wait_for_output() {
    shared.o_empty.wait(o_phase ^ 1);
    o_phase ^= 1;
  }
