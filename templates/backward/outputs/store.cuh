  // Rounds 64 rows of a gradient and stores them through the shared memory of what it is the gradient of.
  template <int columns, int slab, int swizzle_bits, int count>
  __device__ __forceinline__ void store(const CUtensorMap& map, Element* space, const float (&gradient)[count], float scale,
                                        const Tile& tile) {
    round_rows<columns, slab, swizzle_bits>(space, gradient, scale);
    barrier_sync(kStore + warpgroup, kWarpgroup);
    if (threadIdx.x % kWarpgroup == 0) {
#pragma unroll
      for (int column = 0; column < columns; column += slab) {
        copy_rows(map, space + (column / slab * kBlockN + first_row()) * slab, column, tile);
      }
      cute::tma_store_arrive();
    }
  }

  __device__ __forceinline__ void finish() {
    if (threadIdx.x % kWarpgroup == 0) {
      cute::tma_store_wait<0>();  // shared memory must outlive the copies from it
    }
  }

  __device__ __forceinline__ void store_dv(const Tile& tile, const ValueGradient& dv) {
    store<kHeadDimVPadded, kVSlab, kVSwizzleBits>(params.dv, shared.v, dv, 1.f, tile);
  }

  __device__ __forceinline__ void store_dk(const Tile& tile, const KeyGradient& dk) {
    store<kHeadDimPadded, kQkSlab, kQkSwizzleBits>(params.dk, shared.k, dk, params.scale, tile);
  }

