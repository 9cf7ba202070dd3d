  __device__ __forceinline__ void run() {
    Units units(params);
    Unit unit;
    do {
      while (units.next(unit)) {
        take(unit);
      }
    } while (units.take_turns());
  }
