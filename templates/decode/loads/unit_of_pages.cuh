  // All of a unit, by a warp.
  __device__ __forceinline__ void take(const Unit& unit) {
    if (unit.first_key < unit.last_key) {
      look_up(unit);
    }
    for (int key = unit.first_key; key < unit.last_key; key += kBlockN) {
      load<kHeadDimPadded>(params.k, params.k_row, unit, key);
      if (key == unit.first_key && lane() == 0) {  // memory that takes longer to answer was asked first
        load_q(unit);
      }
      load<kHeadDimVPadded>(params.v, params.v_row, unit, key);
    }
    __syncwarp();
  }
