  // How many keys there are from a block's first on.
  __device__ __forceinline__ int keys_seen(const Tile& tile, int block) {
    return seqlen_k(tile) - block * kBlockN;
  }
