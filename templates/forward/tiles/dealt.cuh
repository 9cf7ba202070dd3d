// The tiles of one thread block.
struct Tiles : Order {
  __device__ __forceinline__ explicit Tiles(const SharedStorage&) {}

  // The next tile that sees a key; false at the end.
  __device__ __forceinline__ bool next(const Params& params, Tile& tile) {
    while (index < params.slots) {
      tile = tile_at(params, index);
      advance();
      if (tile.blocks.last > tile.blocks.first) {
        return true;
      }
    }
    return false;
  }
};
