// What bits 4… of a byte's offset in a slab are xored with, by the offset of its row.
template <int swizzle_bits>
__device__ __forceinline__ uint32_t flip(uint32_t row_offset) {
  return (row_offset >> 3) & (((1 << swizzle_bits) - 1) << 4);
}

// Transposes a warp's part of a block, in units of 32 keys by 16 columns. To ldmatrix two columns are one 16-bit
// element: a lane gets keys 2q, 2q + 1, and from the next matrix 8 + 2q, 9 + 2q, of a pair of columns, where q is
// lane % 4. That is P's order already. What remains is to part the pair.
template <int transposer>
__device__ __forceinline__ void transpose(const Element* rows, Element* columns) {
  uint32_t lane;  // read anew, lest what follows from it stay in registers
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  const uint32_t key_row = lane * kVRowsSlab;  // a lane gives ldmatrix the address of its key
  const uint32_t source = key_row ^ flip<kVRowsSwizzleBits>(key_row);
  // stmatrix writes eight rows at once, which must be in different banks, as even columns alone are not: so
  // the lanes of the upper four pairs part them the other way round.
  const uint32_t even = lane < 16 ? 0x6420 : 0x7531;
  const uint32_t pair = lane % 8;  // whose address, in matrix lane / 8, this lane gives to stmatrix
  const uint32_t column_row = (2 * pair + (lane / 8 % 2 ^ pair / 4)) * kVSlab;
  const uint32_t target = (column_row + lane / 16 * 16) ^ flip<kVSwizzleBits>(column_row);

  constexpr int kKeyUnits = kBlockN / 32;
  constexpr int kUnits = kHeadDimVPadded / 16 * kKeyUnits;  // of all transposers
  constexpr int kFirst = ceil_div(transposer * kUnits, kTransposers);
  constexpr int kLast = ceil_div((transposer + 1) * kUnits, kTransposers);
  uint32_t x[kTransposedLoads][4];
#pragma unroll
  for (int next = kFirst; next < kLast + kTransposedLoads; ++next) {
    if (next >= kFirst + kTransposedLoads) {
      const int unit = next - kTransposedLoads, key = unit % kKeyUnits * 32, column = unit / kKeyUnits * 16;
      const uint32_t(&pairs)[4] = x[unit % kTransposedLoads];
      store_matrices(columns + (key / kVSlab * kHeadDimVPadded + column) * kVSlab + (target ^ key % kVSlab),
                     __byte_perm(pairs[0], pairs[1], even), __byte_perm(pairs[0], pairs[1], even ^ 0x1111),
                     __byte_perm(pairs[2], pairs[3], even), __byte_perm(pairs[2], pairs[3], even ^ 0x1111));
    }
    if (next < kLast) {
      const int key = next % kKeyUnits * 32, column = next / kKeyUnits * 16;
      load_transposed(rows + (column / kVRowsSlab * kBlockN + key) * kVRowsSlab + (source ^ column % kVRowsSlab),
                      x[next % kTransposedLoads]);
    }
  }
}

