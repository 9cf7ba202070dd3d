  // The first keys, where tiles stay whole or splits are taken in turns, by lengths that the launch before this one may
  // change: only less will be there. A run that begins within a tile has other first keys by other lengths, and was slower.
  __device__ __forceinline__ void prefetch_first() {
    if (params.prefetched_keys == 0) {
      return;
    }
    Unit unit;
    if (params.whole_groups > 0) {
      unit = first_of_whole(params);
    } else if (Units units(params); !units.in_turns || !units.next(unit)) {
      return;
    }
    if (lane() == 0) {
      prefetch(unit);
    }
  }
