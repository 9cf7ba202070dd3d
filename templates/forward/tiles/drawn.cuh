// The tiles that the producer draws, for one warp.
struct Tiles {
  SharedStorage& shared;
  uint32_t taken = 0;  // so far

  // The next tile that sees a key; false at the end.
  __device__ __forceinline__ bool next(const Params&, Tile& tile) {
    const uint32_t stage = taken % kTileStages, phase = taken / kTileStages % 2;
    shared.tile_full[stage].wait(phase);
    tile = shared.tiles[stage];
    __syncwarp();  // one lane arrives for all
    if (lane() == 0) {
      shared.tile_empty[stage].arrive();
    }
    ++taken;
    return tile.blocks.last > tile.blocks.first;
  }
};
