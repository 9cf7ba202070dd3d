  bool exact = false;   // references are maxima, not the caller's: for rows of this thread that failed
  bool failed = false;  // any of them
  bool repeats[kRows / 4];

  // Whether a column is a row of the unit that is computed now.
  __device__ __forceinline__ bool takes(const Unit& unit, int j) const {
    return exact ? repeats[j] : column_at(j) < unit.rows;
  }

  __device__ __forceinline__ float first_reference(const Unit& unit, int j) const {
    const int head = unit.first_head + column_at(j) % params.tile_heads.value;
    return exact ? -INFINITY : params.reference[head] * params.inverse_scale;
  }

  // Which of a unit's rows are to be computed again, by all lanes of a warp; whether there are any.
  __device__ __forceinline__ bool find_failed(const Unit& unit) {
    bool any = false;
#pragma unroll
    for (int j = 0; j < kRows / 4; ++j) {
      repeats[j] = has_failed(params, unit, column_at(j));
      any |= repeats[j];
    }
    return __any_sync(0xffffffffu, any);
  }
