// ---- Output ----------------------------------------------------------------------------------

// Four values in a register, the first in its lowest byte; what is too large becomes 448.
__device__ __forceinline__ uint32_t pack(float a, float b, float c, float d) {
  uint32_t packed;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

using Packed = uint32_t[kChunks][2];  // a lane's share of one row

__device__ __forceinline__ void pack(const float (&y)[kChunks][8], float scale, Packed& packed) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      const float* four = &y[i][4 * word];
      packed[i][word] = pack(four[0] * scale, four[1] * scale, four[2] * scale, four[3] * scale);
    }
  }
}
