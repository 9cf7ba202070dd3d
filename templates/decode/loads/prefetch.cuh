  // Asks for first keys and values in the L2 cache, while the launch before this one ends. That may change them, which L2
  // then knows.
  __device__ __forceinline__ void prefetch(const Unit& unit) {
    const int last_key = min(unit.last_key, unit.first_key + params.prefetched_keys);
    for (int key = unit.first_key; key < last_key; key += kBlockN) {
      prefetch<kHeadDimPadded>(params.k, unit, key);
      prefetch<kHeadDimVPadded>(params.v, unit, key);
    }
  }
