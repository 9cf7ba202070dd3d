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
