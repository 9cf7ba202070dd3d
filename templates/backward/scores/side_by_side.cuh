// Of a row tensor cores add two numbers to products of its: as sums of three bf16 each, side by side, core matrices of eight
// rows.
using Statistics = uint4[kBlockM];

// What of a row's statistics a product adds, by where its ones lie.
enum Statistic { kOfDelta, kOfLse };

// Two numbers as sums of three bf16 each, which is all of their 24 bits, and two zeros.
__device__ __forceinline__ uint4 in_parts(float a, float b) {
  uint32_t part[6];
#pragma unroll
  for (int i = 0; i < 6; ++i) {
    float& number = i < 3 ? a : b;
    part[i] = __float_as_uint(number) & 0xffff0000;
    number -= __uint_as_float(part[i]);
  }
  return {part[1] | part[0] >> 16, part[3] | part[2] >> 16, part[5] | part[4] >> 16, 0};
}
