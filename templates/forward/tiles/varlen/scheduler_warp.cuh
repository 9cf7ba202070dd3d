// The warp that draws tiles and passes them on to all others.
__device__ __forceinline__ void schedule_tiles(const Params& params, SharedStorage& shared) {
  TileFinder finder{params};
  finder.begin_with_longest(shared.counted);
  int number = blockIdx.x;  // nobody draws the first tile of each block
  TileRing ring;
  for (uint32_t passed_on = 0;; ++passed_on) {
    const uint32_t stage = passed_on % kTileStages, phase = passed_on / kTileStages % 2;
    shared.tile_empty[stage].wait(phase ^ 1);
    const bool found = finder.find(number, shared.tiles[stage]);
    __syncwarp();
    if (lane() == 0) {
      ring.pass_on(shared, stage);
    }
    if (!found) {
      return;
    }
    // The last to draw, one past the end for each block, wraps the counter to zero: the next call finds it as this one
    // did.
    shared.tile_wanted.wait(passed_on % 2);
    int drawn = 0;
    if (lane() == 0) {
      drawn = atomicInc(params.tiles_drawn, finder.tiles - 1);
    }
    number = gridDim.x + __shfl_sync(0xffffffff, drawn, 0);
  }
}
