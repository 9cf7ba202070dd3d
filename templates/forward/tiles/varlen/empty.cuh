// Then those that see none, which are nobody's work but for their zeros.
struct EmptyTiles {
  Tiles& tiles;

  __device__ __forceinline__ bool next(const Params&, Tile& tile) {
    tile = tiles.look();
    if (tile.blocks.last < tile.blocks.first) {
      return false;
    }
    tiles.take_together();
    return true;
  }
};
