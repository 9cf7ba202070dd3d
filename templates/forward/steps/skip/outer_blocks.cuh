  int left_over = 0;  // the tile's first blocks, visited last, that are fully masked for its own rows and not yet skipped

  // A tile without the first and the last blocks that are fully masked for its own rows; one block is left even so.
  // What is skipped before it begins with what is left over of the last one.
  __device__ __forceinline__ Tile warpgroup_tile(Tile tile) {
    const Blocks own = own_blocks(tile);
    const int first = min(own.first, tile.blocks.last - 1), last = max(first + 1, own.last);
    tile.skipped = left_over + tile.blocks.last - last;
    left_over = first - tile.blocks.first;
    tile.blocks = own;
    tile.blocks.first = first;
    tile.blocks.last = last;
    return tile;
  }
