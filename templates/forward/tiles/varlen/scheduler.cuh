// Draws tiles and passes them on. Used by the producer's whole warp: all others have work.
struct TileScheduler {
  SharedStorage& shared;
  TileFinder finder;
  int drawn = blockIdx.x - gridDim.x;  // beyond the first tile of each block, which nobody draws
  uint32_t passed_on = 0;              // tiles so far
  TileRing ring;

  // Asks for the next tile, by a single thread. The last to ask, one past the end for each block, wraps the counter to
  // zero: the next call finds it as this one did.
  __device__ __forceinline__ void draw() { drawn = atomicInc(finder.params.tiles_drawn, finder.tiles - 1); }

  // The block of a tile at which the next tile is drawn.
  __device__ __forceinline__ static int draws_at(const Blocks& blocks) { return blocks.first + kDrawAhead; }

  // The next tile, once it is drawn; false at the end.
  __device__ __forceinline__ bool next(Tile& tile) {
    const int number = gridDim.x + __shfl_sync(0xffffffff, drawn, 0);
    const uint32_t stage = passed_on % kTileStages, phase = passed_on / kTileStages % 2;
    shared.tile_empty[stage].wait(phase ^ 1);
    const bool found = finder.find(number, shared.tiles[stage]);
    __syncwarp();
    tile = shared.tiles[stage];
    if (lane() == 0) {
      ring.pass_on(shared, stage);
    }
    ++passed_on;
    return found;
  }
};
