  // A tile without the last blocks that are fully masked for its own rows; one block is left even so.
  __device__ __forceinline__ Tile warpgroup_tile(Tile tile) {
    const Blocks own = own_blocks(tile);
    const int first = tile.blocks.first, last = max(first + 1, own.last);
    tile.skipped = tile.blocks.last - last;
    tile.blocks = own;
    tile.blocks.first = first;
    tile.blocks.last = last;
    return tile;
  }
