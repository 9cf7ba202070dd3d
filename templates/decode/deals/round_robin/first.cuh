  // The first keys, by lengths that the launch before this one may change: only less will be there.
  __device__ __forceinline__ void prefetch_first() {
    Units units(params);
    Unit unit;
    if (units.find(blockIdx.x, unit) && lane() == 0) {
      prefetch(unit);
    }
  }
