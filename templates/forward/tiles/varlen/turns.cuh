// Warpgroups take 64 rows each in turns, from tile to tile: where a tile has rows for some of them, the others go on
// to the next one.
struct TileRing {
  int turn = 0;  // whose it is

  __device__ __forceinline__ void pass_on(SharedStorage& shared, uint32_t stage) {
    Tile& tile = shared.tiles[stage];
    tile.first_warpgroup = turn;
    turn = (turn + tile.warpgroups) % kConsumers;
    shared.tile_full[stage].arrive();
  }
};
