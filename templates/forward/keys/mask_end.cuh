  // Masks the keys of a block that do not exist.
  __device__ __forceinline__ void mask_block(float (&s)[kBlockN / 2], const Tile& tile, int block) {
    const int last = seqlen_k(tile) - block * kBlockN - lane() % 4 * 2;
    if (seqlen_k(tile) >= (block + 1) * kBlockN) {
      return;
    }
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) {
      if (column_of(i) >= last) {
        s[i] = -INFINITY;
      }
    }
  }
