  __device__ __forceinline__ Keys row_keys(const Tile& tile, int row) const { return seen_by(params, row); }
