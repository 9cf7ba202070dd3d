  // Issues a part of PV: its columns from this one on. The tensor cores cut long sums off, so that none goes beyond a block.
  __device__ __forceinline__ void issue_pv(Part& part, Probabilities& p, int column) {
    const Descriptor first = v_begin(column);
    fence_operand(part);
    fence_operand(p);
    wgmma_fence();
    wgmma_pv<false>(part, p, first);
#pragma unroll
    for (int n = kStepK; n < kBlockN; n += kStepK) {
      wgmma_pv<true>(part, p + n * sizeof(Element) / 8, first + v_offset(n));
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void add(Output& o, Part& part, int column) {
    fence_operand(part);
#pragma unroll
    for (int i = 0; i < kPartColumns / 2; ++i) {
      o[column / 2 + i] += part[i];
    }
  }
