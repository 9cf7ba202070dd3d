  // Issues S = K Qᵀ, of the Q in a stage.
  __device__ __forceinline__ void issue_scores(Scores& s, int stage) {
    const Descriptor keys = descriptor<kQkSlab>(shared.k + first_row() * kQkSlab, kQkDescriptor);
    const Descriptor rows = descriptor<kQkSlab>(shared.q[stage], kQkDescriptor);
    fence_operand(s);
    wgmma_fence();
    wgmma_scores<false>(s, keys, rows);
#pragma unroll
    for (int d = kStepK; d < kHeadDimPadded; d += kStepK) {
      wgmma_scores<true>(s, keys + column_offset<kBlockN, kQkSlab>(d), rows + column_offset<kBlockM, kQkSlab>(d));
    }
    wgmma_commit();
  }

