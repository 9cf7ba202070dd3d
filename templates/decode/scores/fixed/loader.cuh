  // Whether a row of a unit is to be computed again, by all lanes of a warp.
  __device__ __forceinline__ bool find_failed(const Unit& unit) {
    bool failed = false;
    for (int row = lane(); row < unit.rows; row += 32) {
      failed |= has_failed(params, unit, row);
    }
    return __any_sync(0xffffffffu, failed);
  }
