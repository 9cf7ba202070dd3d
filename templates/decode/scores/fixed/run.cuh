  // All units, or `again` those of which a row has failed.
  __device__ __forceinline__ void run(bool again) {
    Units units(params);
    Unit unit;
    for (int number = blockIdx.x; units.find(number, unit); number += gridDim.x) {
      if (!again || find_failed(unit)) {
        take(unit);
      }
    }
  }
