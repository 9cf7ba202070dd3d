  // One arrival per warp, since wgmma completes per warp.
  __device__ __forceinline__ void arrive(Barrier& barrier) {
    if (lane() == 0) {
      barrier.arrive();
    }
  }

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

  __device__ __forceinline__ void fence_output() {
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
      fence_operand(o[i]);
    }
  }

  // The next buffer of the ring has K: its scores, and the product before them, are there at the end.
  __device__ __forceinline__ void finish_scores(Scores& s) {
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      fence_operand(s[i]);
    }
    arrive(shared.empty[tile.stage]);
    tile.advance();
  }

  // Makes zeros of what lies behind the last of `keys` rows of V: P is 0 there, but it may be no number.
  __device__ __forceinline__ void clear_values(Element* values, int keys) {
    constexpr int kParts = kSlab * sizeof(Element) / sizeof(uint4);  // of a slab's row
    uint4* const parts = reinterpret_cast<uint4*>(values);
    for (int i = keys * kParts + threadIdx.x; i < kBlockN * kParts; i += kWarpgroup) {
#pragma unroll
      for (int slab = 0; slab < kHeadDimVPadded / kSlab; ++slab) {
        parts[slab * kBlockN * kParts + i] = make_uint4(0, 0, 0, 0);
      }
    }
  }
