// Four numbers of e4m3, saturated, the first in the lowest byte.
__device__ __forceinline__ uint32_t pack(float a, float b, float c, float d) {
  uint32_t quad;
  asm("{ .reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, { low, high }; }"
      : "=r"(quad)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return quad;
}
