  // Of a thread's columns, which of the unit's KV heads one belongs to, and which of that head's rows it is.
  __device__ static constexpr int own_of(int j) { return j / 2 * 8 / kOwnRows; }
  __device__ __forceinline__ int own_row(int j) const { return column_at(j) % kOwnRows; }

  // Whether a column is a row of the unit.
  __device__ __forceinline__ bool takes(const Unit& unit, int j) const {
    return own_row(j) < unit.rows && first_head_of(params, unit, own_of(j)) < params.heads;
  }
