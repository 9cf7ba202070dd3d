// Numbers of CUDA on a CPU: vectors, narrow types, and functions of them that no thread has a part in.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
using std::max, std::min;

// ---- Narrow numbers ------------------------------------------------------------------------

namespace sim {

template <class To, class From>
To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline uint16_t to_half(float x) { return bits<uint16_t>(_Float16(x)); }
inline float of_half(uint16_t x) {
  const uint32_t rest = uint32_t(x & 0x7fff) << 13;  // with an exponent that is 112 too small
  const float size = x & 0x4000 && (x & 0x7c00) == 0x7c00 ? bits<float>(rest | 0x7f800000) : bits<float>(rest) * 0x1p112f;
  return bits<float>(bits<uint32_t>(size) | uint32_t(x & 0x8000) << 16);
}

inline uint16_t to_bfloat(float x) {
  const uint32_t b = bits<uint32_t>(x);
  return std::isnan(x) ? 0x7fff : uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
inline float of_bfloat(uint16_t x) { return bits<float>(uint32_t(x) << 16); }

inline float of_e4m3(uint8_t x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  const float size = (x & 127) == 127 ? NAN : exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
  return x & 128 ? -size : size;
}
// To the nearest, ties to even; what is too large becomes the largest.
inline uint8_t to_e4m3(float x) {
  const uint8_t sign = std::signbit(x) ? 128 : 0;
  if (std::isnan(x)) {
    return 127;
  }
  const float size = std::fabs(x);
  int exponent = 0;
  std::frexp(size, &exponent);
  const float unit = std::ldexp(1.f, std::max(exponent - 4, -9));
  const float rounded = std::nearbyint(size / unit) * unit;
  if (rounded >= 448.f) {
    return sign | 126;
  }
  std::frexp(rounded, &exponent);
  return rounded < 0x1p-6f ? sign | uint8_t(rounded * 512) : sign | uint8_t((exponent + 6) << 3 | (int(std::ldexp(rounded, 4 - exponent)) & 7));
}
inline uint32_t to_e4m3x2(float high, float low) { return to_e4m3(low) | to_e4m3(high) << 8; }

}  // namespace sim

struct __nv_fp8_e4m3 {
  uint8_t bits;
  operator float() const { return sim::of_e4m3(bits); }
};
struct __half {
  uint16_t bits;
  __half() = default;
  __half(float x) : bits(sim::to_half(x)) {}
  operator float() const { return sim::of_half(bits); }
};
struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float x) : bits(sim::to_bfloat(x)) {}
  operator float() const { return sim::of_bfloat(bits); }
};
struct alignas(4) __half2 { __half x, y; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline float2 __half22float2(__half2 a) { return {sim::of_half(a.x.bits), sim::of_half(a.y.bits)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 a) { return {sim::of_bfloat(a.x.bits), sim::of_bfloat(a.y.bits)}; }

inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  const float2 x = __half22float2(a), y = __half22float2(b), z = __half22float2(c);
  return __floats2half2_rn(std::fma(x.x, y.x, z.x), std::fma(x.y, y.y, z.y));
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  const float2 x = __bfloat1622float2(a), y = __bfloat1622float2(b), z = __bfloat1622float2(c);
  return __floats2bfloat162_rn(std::fma(x.x, y.x, z.x), std::fma(x.y, y.y, z.y));
}
inline __half2 __hmin2(__half2 a, __half2 b) { return {a.x < b.x ? a.x : b.x, a.y < b.y ? a.y : b.y}; }
inline __half2 __hmax2(__half2 a, __half2 b) { return {a.x > b.x ? a.x : b.x, a.y > b.y ? a.y : b.y}; }
inline __nv_bfloat162 __hmin2(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.x < b.x ? a.x : b.x, a.y < b.y ? a.y : b.y}; }
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.x > b.x ? a.x : b.x, a.y > b.y ? a.y : b.y}; }
inline bool __hbeq2(__half2 a, __half2 b) {
  const float2 x = __half22float2(a), y = __half22float2(b);
  return x.x == y.x && x.y == y.y;
}
inline bool __hbeq2(__nv_bfloat162 a, __nv_bfloat162 b) {
  const float2 x = __bfloat1622float2(a), y = __bfloat1622float2(b);
  return x.x == y.x && x.y == y.y;
}

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(int(x)); }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline int __clz(uint32_t x) { return x ? __builtin_clz(x) : 32; }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = x | uint64_t(y) << 32;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) {
    found |= uint32_t(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  }
  return found;
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t(a) * b >> 32; }
inline float __uint_as_float(uint32_t x) { return sim::bits<float>(x); }
inline uint32_t __float_as_uint(float x) { return sim::bits<uint32_t>(x); }
inline float __int_as_float(int32_t x) { return sim::bits<float>(x); }
inline int32_t __float_as_int(float x) { return sim::bits<int32_t>(x); }
