// Draws tiles and passes them on. Used by the producer.
struct TileScheduler {
  const Params& params;
  SharedStorage& shared;
  int drawn = blockIdx.x - gridDim.x;  // beyond the first tile of each block, which nobody draws
  uint32_t passed_on = 0;              // tiles so far

  // Asks for the next tile. The last to ask, one past the end for each block, wraps the counter to zero: the next call
  // finds it as this one did.
  __device__ __forceinline__ void draw() { drawn = atomicInc(params.tiles_drawn, params.slots - 1); }

  // The block of a tile at which the next tile is drawn.
  __device__ __forceinline__ static int draws_at(const Blocks& blocks) { return min(blocks.first + kDrawAhead, blocks.last - 1); }

  // The next tile, once it is drawn; false at the end.
  __device__ __forceinline__ bool next(Tile& tile) {
    const int index = gridDim.x + drawn;
    const uint32_t stage = passed_on % kTileStages, phase = passed_on / kTileStages % 2;
    tile = tile_at(params, index);
    if (index >= params.slots) {
      tile.blocks.last = tile.blocks.first;
    }
    shared.tile_empty[stage].wait(phase ^ 1);
    shared.tiles[stage] = tile;
    shared.tile_full[stage].arrive();
    ++passed_on;
    return index < params.slots;
  }
};
