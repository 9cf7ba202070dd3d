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

  // Adds a part to O, which is made relative to the row maxima of the part's P.
  __device__ __forceinline__ void add(Output& o, Part& part, int column, const float (&rescale)[2]) {
    fence_operand(part);
#pragma unroll
    for (int i = 0; i < kPartColumns / 2; ++i) {
      o[column / 2 + i] = fmaf(o[column / 2 + i], rescale[row_of(i)], part[i]);
    }
  }
