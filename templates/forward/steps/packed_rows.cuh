  // A warpgroup's first query.
  __device__ __forceinline__ int first_row(const Tile& tile) { return tile.first_row + warpgroup * params.queries.value; }
