  template <int columns>
  __device__ __forceinline__ void prefetch(const CUtensorMap& map, const Unit& unit, int key) {
#pragma unroll
    for (int column = 0; column < columns; column += kSlab) {
      cute::SM90_TMA_LOAD_4D::PREFETCH::copy(&map, column, unit.sequence.first + key, unit.kv_head, unit.batch);
    }
  }
