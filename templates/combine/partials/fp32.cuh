__device__ __forceinline__ void widen(const uint4& raw, float (&numbers)[kVector]) {
  numbers[0] = __uint_as_float(raw.x);
  numbers[1] = __uint_as_float(raw.y);
  numbers[2] = __uint_as_float(raw.z);
  numbers[3] = __uint_as_float(raw.w);
}
