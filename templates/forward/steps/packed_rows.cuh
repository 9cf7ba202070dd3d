  // A warpgroup's first query.
  __device__ __forceinline__ int first_row(const Tile& tile) { return tile.first_row + warpgroup * params.queries; }
  // Which of the warpgroup's queries a row is of. A branch here would cost all steps registers.
  __device__ __forceinline__ int query_of(int row) const {
    const int quotient = __umulhi(row, params.pack.multiplier) >> params.pack.shift;
    return params.pack.value == 1 ? row : quotient;
  }
