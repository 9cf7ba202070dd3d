// Warpgroups take 64 rows each in turns, from tile to tile: where a tile has rows for some of them, the others go on
// to the next one.
struct Turns {
  int next = 0;  // whose turn it is

  __device__ __forceinline__ void give(Tile& tile) {
    tile.first_warpgroup = next;
    next = (next + tile.warpgroups) % kConsumers;
  }
};
