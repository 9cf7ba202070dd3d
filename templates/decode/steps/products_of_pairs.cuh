  // Of an accumulator, one KV head's columns.
  __device__ static __forceinline__ float (&columns_of(float (&all)[kRows / 2], int own))[kOwnRows / 2] {
    return reinterpret_cast<float (&)[kOwnRows / 2]>(all[own * (kOwnRows / 2)]);
  }

  // From the descriptor of a buffer to that of the slab with a KV head's `column`: of the second head the first slab has
  // half of its columns, and is the first head's last where rows are adjacent. And on to the column.
  __device__ __forceinline__ uint32_t slab_offset(int own, int column) const {
    const int slab = (own * kHeadDim + column) / kSlab;
    return column_offset<kBlockN, kSlab>((own > 0 && slab == kSharedSlab && !params.adjacent ? kPairSlabs : slab) * kSlab);
  }
  __device__ static constexpr uint32_t within_slab(int own, int column) {
    return column_offset<kBlockN, kSlab>((own * kHeadDim + column) % kSlab);
  }

  // Issues Sᵀ = K Qᵀ, of each KV head.
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
#pragma unroll
      for (int own = 0; own < kKvHeads; ++own) {
        const Descriptor a = keys + row_offset(i * kTileM);
        const Descriptor b = queries + column_offset<kOwnRows, kSlab>(own * kHeadDimPadded);
        wgmma_scores<false>(columns_of(s[i], own), a + slab_offset(own, 0) + within_slab(own, 0), b);
#pragma unroll
        for (int column = kStepK; column < kHeadDim; column += kStepK) {
          wgmma_scores<true>(columns_of(s[i], own), a + slab_offset(own, column) + within_slab(own, column),
                             b + column_offset<kOwnRows, kSlab>(column));
        }
      }
    }
    wgmma_commit();
  }

  // Issues Oᵀ += Vᵀ Pᵀ, of each KV head.
  __device__ __forceinline__ void issue_output(const Element* values) {
    const Descriptor a = descriptor<kSlab>(values, kDescriptor);
    const Descriptor b = descriptor<kSlab>(shared.p[p], kDescriptor);
    fence_output();
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
#pragma unroll
      for (int own = 0; own < kKvHeads; ++own) {
#pragma unroll
        for (int key = 0; key < kBlockN; key += kStepK) {
          wgmma_output<true>(columns_of(o[i], own), a + slab_offset(own, i * kTileM - own * kHalfSlab) + row_offset(key),
                             b + (column_offset<kRows, kSlab>(key) + row_offset(own * kOwnRows)));
        }
      }
    }
    wgmma_commit();
  }
