  // The first of its keys in the tile: both warpgroups have all 64.
  __device__ __forceinline__ int first_row() const { return 0; }

