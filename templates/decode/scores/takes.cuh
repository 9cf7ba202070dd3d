  // Whether a column is a row of the unit.
  __device__ __forceinline__ bool takes(const Unit& unit, int j) const { return column_at(j) < unit.rows; }
