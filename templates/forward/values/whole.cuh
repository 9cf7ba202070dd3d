  // O is complete but for GEMMs that were issued later: V is released.
  template <int later = 0>
  __device__ __forceinline__ void finish_pv(Output& o) {
    wgmma_wait<later>();
    fence_operand(o);
    release_v();
  }
