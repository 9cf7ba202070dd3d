  // Zeros rows of the warpgroups that hold no head of a whole query, once: nobody ever loads them, and scores of zeros
  // disturb no other row.
  __device__ __forceinline__ void clear_unused_rows() {
    constexpr int kPieces = kQkSlab * sizeof(Element) / sizeof(uint4);  // of a row of a slab
    const int used = params.pack.value * params.queries;
    if (used == kWarpgroupRows) {
      return;
    }
#pragma unroll 1
    for (int first = 0; first < kQStages * kBlockM * kHeadDimPadded; first += kWarpgroupRows * kQkSlab) {  // slabs
      uint4* slab = reinterpret_cast<uint4*>(shared.q[0] + first);
      for (int i = used * kPieces; i < kWarpgroupRows * kPieces; ++i) {
        slab[i] = {};
      }
    }
    cutlass::arch::fence_view_async_shared();
  }
