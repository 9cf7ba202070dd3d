  // Issues Sᵀ = K Qᵀ.
  __device__ __forceinline__ void issue_scores(Scores& s) {
    const Descriptor keys = descriptor<kSlab>(shared.ring[tile.stage], kDescriptor);
    const Descriptor queries = descriptor<kSlab>(shared.q[q.stage], kDescriptor);
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      fence_operand(s[i]);
    }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      const Descriptor own = keys + row_offset(i * kTileM);
      wgmma_scores<false>(s[i], own, queries);
#pragma unroll
      for (int column = kStepK; column < kHeadDim; column += kStepK) {
        wgmma_scores<true>(s[i], own + column_offset<kBlockN, kSlab>(column), queries + column_offset<kRows, kSlab>(column));
      }
    }
    wgmma_commit();
  }

  // Issues Oᵀ += Vᵀ Pᵀ.
  __device__ __forceinline__ void issue_output(const Element* values) {
    const Descriptor a = descriptor<kSlab>(values, kDescriptor);
    const Descriptor b = descriptor<kSlab>(shared.p[p], kDescriptor);
    fence_output();
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
#pragma unroll
      for (int key = 0; key < kBlockN; key += kStepK) {
        wgmma_output<true>(o[i], a + (column_offset<kBlockN, kSlab>(i * kTileM) + row_offset(key)),
                     b + column_offset<kRows, kSlab>(key));
      }
    }
    wgmma_commit();
  }
