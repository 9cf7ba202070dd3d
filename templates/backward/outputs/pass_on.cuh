  // Rounds 64 rows of a gradient and hands them on to the thread that stores them.
  template <int columns, int slab, int swizzle_bits, int count>
  __device__ __forceinline__ void pass_on(Barrier& full, Element* space, const float (&gradient)[count], float scale) {
    round_rows<columns, slab, swizzle_bits>(space, gradient, scale);
    full.arrive();  // by every thread: with a branch here ptxas takes nothing in the loop over tiles to be the same for a warp
  }

  // Both gradients of a tile, where all have read dS.
  __device__ __forceinline__ void leave(const Tile& tile, const KeyGradient& dk, const ValueGradient& dv) {
    if (tile.first_key < params.kept_keys) {
      keep(share_of(tile).dv, dv);
      keep(share_of(tile).dk, dk);
    }
    pass_on<kHeadDimVPadded, kVSlab, kVSwizzleBits>(shared.dv_full, shared.ds[0], dv, 1.f);
    for (Barrier& empty : shared.dq_empty) {
      empty.wait(dq_phase);  // what adds up has read it
    }
    dq_phase ^= 1;
    pass_on<kHeadDimPadded, kQkSlab, kQkSwizzleBits>(shared.dk_full, reinterpret_cast<Element*>(shared.dq), dk, params.scale);
  }

