  // What this block's rows see, where the tile's blocks are those of the pair.
  __device__ __forceinline__ Blocks own_blocks(const Tile& tile) {
    return blocks_of(tile.sequence, tile.first_row, tile.first_row + kBlockM - 1);
  }
