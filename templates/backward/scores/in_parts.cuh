// A number as the sum of three bf16, which is all of its 24 bits, and of five zeros.
__device__ __forceinline__ uint4 in_parts(float number) {
  uint32_t part[3];
#pragma unroll
  for (uint32_t& bits : part) {
    bits = __float_as_uint(number) & 0xffff0000;
    number -= __uint_as_float(bits);
  }
  return {part[1] | part[0] >> 16, part[2] >> 16, 0, 0};
}
