  // Issues O += PV.
  __device__ __forceinline__ void issue_pv(Output& o, Probabilities& p) {
    const Descriptor first = v_begin();
    fence_operand(o);
    fence_operand(p);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < kBlockN; n += kStepK) {
      wgmma_pv<true>(o, p + n * sizeof(Element) / 8, first + v_offset(n));
    }
    wgmma_commit();
  }

  // O is complete but for GEMMs that were issued later: V is released.
  template <int later = 0>
  __device__ __forceinline__ void finish_pv(Output& o) {
    wgmma_wait<later>();
    fence_operand(o);
    release_v();
  }
