  // All of a unit, by a warp.
  __device__ __forceinline__ void take(const Unit& unit) {
    if (lane() == 0) {
      for (int key = unit.first_key; key < unit.last_key; key += kBlockN) {
        load_k(unit, key);
        if (key == unit.first_key) {  // memory that takes longer to answer was asked first
          load_q(unit);
        }
        load_v(unit, key);
      }
    }
    __syncwarp();
  }
