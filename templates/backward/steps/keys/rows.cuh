  // The first of its 64 keys in the tile.
  __device__ __forceinline__ int first_row() const { return warpgroup * kWarpgroupRows; }

