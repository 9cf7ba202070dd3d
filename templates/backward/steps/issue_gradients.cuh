  // Issues dV += P dO.
  __device__ __forceinline__ void issue_dv(ValueGradient& dv, Packed& p) {
    const Descriptor rows = along_columns<kBlockM, kVSlab>(shared.dout[dout().stage], kVDescriptor);
    fence_operand(p);
    fence_operand(dv);
    wgmma_fence();
#pragma unroll
    for (int row = 0; row < kBlockM; row += kStepK) {
      wgmma_gradient<true>(dv, p + row / 4, rows + row_offset<kVSlab>(row));
    }
    wgmma_commit();
  }

  // Issues dK += dS Q.
  __device__ __forceinline__ void issue_dk(KeyGradient& dk, Packed& d_scores) {
    const Descriptor rows = along_columns<kBlockM, kQkSlab>(shared.q[q.stage], kQkDescriptor);
    fence_operand(d_scores);
    fence_operand(dk);
    wgmma_fence();
#pragma unroll
    for (int row = 0; row < kBlockM; row += kStepK) {
      wgmma_gradient<true>(dk, d_scores + row / 4, rows + row_offset<kQkSlab>(row));
    }
    wgmma_commit();
  }

