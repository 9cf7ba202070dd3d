  __device__ __forceinline__ static Keys row_keys(const Tile& tile, int row) { return seen_by(tile.sequence, row); }
