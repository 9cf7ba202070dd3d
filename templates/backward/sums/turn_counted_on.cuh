// Which of the parts of a block of rows a tile has: so many come before it. Of a block that does not count on the tile -1, which waits
// for none: numbers of a call that fall may have such.
__device__ __forceinline__ int turn_of(const Lengths& lengths, const Tile& tile, int block) {
  const int turn = tile.first_key / (kCluster * kBlockN) - first_tile_of(lengths, block);
  return turn < tiles_of(lengths, block) ? max(turn, -1) : -1;
}
