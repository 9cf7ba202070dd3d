// The first block of keys that a block of rows sees.
__device__ __forceinline__ int first_tile_of(const Lengths&, int) { return 0; }

// Where the blocks of rows end that see a tile's keys: all rows see the first key.
__device__ __forceinline__ void find_last(Tile& tile, const Lengths&, int, const int& m_blocks) { tile.last = m_blocks; }
