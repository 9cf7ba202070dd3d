  // Before a tile's first V, which waits for the previous tile's O, as many blocks of K as a consumer may skip.
  __device__ __forceinline__ void load_k_ahead(const Tile& tile, int block) {
    constexpr int kSkipped = ceil_div(kBlockM, kBlockN);
    const int far_ahead = max(tile.blocks.first, tile.blocks.last - 1 - kSkipped);
    if (block == tile.blocks.last - 1) {
      for (int ahead = block - 1; ahead >= far_ahead; --ahead) {
        load_k(tile, ahead);
      }
    } else if (block > tile.blocks.first && block <= far_ahead) {
      load_k(tile, block - 1);
    }
  }
