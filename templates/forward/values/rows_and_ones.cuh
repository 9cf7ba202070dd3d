  // Issues O += PV, where V lies by rows, with a slab of ones beside it that every step along K shares: as the address of V
  // grows, the leading byte offset from there to the ones shrinks.
  __device__ __forceinline__ void issue_pv(Output& o, Probabilities& p) {
    fence_operand(o);
    fence_operand(p);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < kBlockN; n += kStepK) {
      const uint32_t units = n * kVSlab * sizeof(Element) >> 4;
      const Element* v_rows = shared.v[v.stage];
      wgmma_pv<true>(o, p + n * sizeof(Element) / 8,
                     descriptor<kVSlab>(v_rows, kVDescriptor, (shared.ones - v_rows) * sizeof(Element)) +
                         (units - (units << 16)));
    }
    wgmma_commit();
  }
