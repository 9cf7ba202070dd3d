// Which of the parts of a block of rows a tile has: so many come before it.
__device__ __forceinline__ int turn_of(const Lengths& lengths, const Tile& tile, int block) {
  return tile.first_key / (kCluster * kBlockN) - first_tile_of(lengths, block);
}
