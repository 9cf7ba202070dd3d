  __device__ __forceinline__ void run() {
    Units units(params);
    Unit unit;
    while (units.next(unit)) {
      take(unit);
    }
  }
