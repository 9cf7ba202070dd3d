  template <int columns>
  __device__ __forceinline__ void prefetch(const CUtensorMap& map, const Unit& unit, int key) {
#pragma unroll
    for (int column = 0; column < columns; column += kSlab) {
      cute::SM90_TMA_LOAD_4D::PREFETCH::copy(&map, column, unit.sequence.first + key, unit.kv_head, unit.batch);
    }
  }

  // Asks for first keys and values in the L2 cache, while the launch before this one ends. That may change them, which L2
  // then knows.
  __device__ __forceinline__ void prefetch(const Unit& unit) {
    const int last_key = min(unit.last_key, unit.first_key + params.prefetched_keys);
    for (int key = unit.first_key; key < last_key; key += kBlockN) {
      prefetch<kHeadDimPadded>(params.k, unit, key);
      prefetch<kHeadDimVPadded>(params.v, unit, key);
    }
  }
