  // What this warpgroup's rows see.
  __device__ __forceinline__ Blocks own_blocks(const Tile& tile) {
    return blocks_of(tile.sequence, first_row(tile), first_row(tile) + params.queries - 1);
  }
