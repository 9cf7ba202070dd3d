  // What this warpgroup's rows see in the split.
  __device__ __forceinline__ Blocks own_blocks(const Tile& tile) {
    return within(params, tile.split, blocks_of(params, first_row(tile), first_row(tile) + kWarpgroupRows - 1));
  }
