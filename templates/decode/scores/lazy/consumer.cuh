  // Whether a column is a row of the unit.
  __device__ __forceinline__ bool takes(const Unit& unit, int j) const { return column_at(j) < unit.rows; }

  // None yet.
  __device__ __forceinline__ float first_reference(const Unit&, int) const { return -INFINITY; }
