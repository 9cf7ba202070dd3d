  // Of a row of the warpgroup's, one of several of a query.
  __device__ __forceinline__ Keys row_keys(const Tile& tile, int row) {
    return seen_by(params, first_row(tile) + query_of(row));
  }
