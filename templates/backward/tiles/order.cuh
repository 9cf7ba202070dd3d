// Blocks of rows in the order of a tile's steps: from the last to the first. All tiles of a head begin with the same, so
// that they add to its dQ one after another.
__device__ __forceinline__ int block_of(const Tile& tile, int step) { return tile.last - 1 - step; }
