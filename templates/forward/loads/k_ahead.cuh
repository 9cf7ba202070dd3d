  int last_loaded;  // the block of K that was loaded last

  // Before a tile's first V, which waits for the previous tile's O, as many blocks of K as a consumer may skip.
  __device__ __forceinline__ void load_k_ahead(const Tile& tile, int block) {
    constexpr int kSkipped = ceil_div(kBlockM, kBlockN);
    const bool is_first = block == tile.blocks.last - 1;
    if (is_first) {
      last_loaded = block;
    }
    while (last_loaded > max(tile.blocks.first, block - (is_first ? kSkipped : 1))) {
      load_k(tile, --last_loaded);
    }
  }
