  // Rounds 64 rows of a gradient to a tile in shared memory.
  template <int columns, int slab, int swizzle_bits, int count>
  __device__ __forceinline__ void round_rows(Element* space, const float (&gradient)[count], float scale) {
    const int row = first_row() + warp_row() + lane() % 16;
#pragma unroll
    for (int column = 0; column < columns; column += 16) {
      char* base = reinterpret_cast<char*>(space + column / slab * kBlockN * slab);
      const float* x = gradient + column / 2;
      store_matrices(base + swizzled<slab, swizzle_bits>(row, column % slab + lane() / 16 * 8),
                     pack(x[0] * scale, x[1] * scale), pack(x[2] * scale, x[3] * scale),
                     pack(x[4] * scale, x[5] * scale), pack(x[6] * scale, x[7] * scale));
    }
    cutlass::arch::fence_view_async_shared();
  }

