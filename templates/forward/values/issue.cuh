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
