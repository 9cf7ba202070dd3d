  // All of a unit, by a warp.
  __device__ __forceinline__ void take(const Unit& unit) {
    if (unit.first_key < unit.last_key) {
      look_up(unit);
    }
    int boxes = 0;  // of a block: as many in all of a unit's
    for (int key = unit.first_key; key < unit.last_key; key += kBlockN) {
      if (key == unit.first_key || boxes > 32) {
        boxes = find_box(unit, key, lane());
      } else {
        find_next_box(unit);
      }
      load<kHeadDimPadded>(params.k, params.k_row, unit, key, boxes);
      if (key == unit.first_key && lane() == 0) {  // memory that takes longer to answer was asked first
        load_q(unit);
      }
      load<kHeadDimVPadded>(params.v, params.v_row, unit, key, boxes);
    }
    __syncwarp();
  }
