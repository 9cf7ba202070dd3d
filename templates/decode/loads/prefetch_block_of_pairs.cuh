  template <int>
  __device__ __forceinline__ void prefetch(const CUtensorMap& map, const Unit& unit, int key) {
    const int heads = params.adjacent ? 1 : 2;  // of the tensor map
    for (int own = 0; own < heads; ++own) {
      for (int column = 0; column < 2 * kHeadDim / heads; column += kSlab) {
        cute::SM90_TMA_LOAD_4D::PREFETCH::copy(&map, column, unit.sequence.first + key, unit.kv_head * heads + own,
                                               unit.batch);
      }
    }
  }
