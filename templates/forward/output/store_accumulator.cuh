// Rounds a warp's 16 rows of an accumulator, element(i), to OutElement and writes them to slabs of 64 rows. Returns
// whether all of this thread's numbers are finite: then 0 times them is 0.
template <int columns, int slab, int swizzle_bits, class Elements>
__device__ __forceinline__ bool store_accumulator(OutElement* tile, Elements element) {
  const int row = warp_row() + lane() % 16;
  const OutPair zero = {};
  OutPair sum = zero;
#pragma unroll
  for (int column = 0; column < columns; column += 16) {
    char* base = reinterpret_cast<char*>(tile + column / slab * kWarpgroupRows * slab);
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = pack(element(column / 2 + 2 * i), element(column / 2 + 2 * i + 1));
      sum = __hfma2(reinterpret_cast<const OutPair&>(pairs[i]), zero, sum);
    }
    store_matrices(base + swizzled<slab, swizzle_bits>(row, column % slab + lane() / 16 * 8), pairs[0], pairs[1],
                   pairs[2], pairs[3]);
  }
  return __hbeq2(sum, zero);
}
