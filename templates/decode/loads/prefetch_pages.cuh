  template <int columns>
  __device__ __forceinline__ void prefetch(const CUtensorMap& map, const Unit& unit, int row_in_page, int page) {
#pragma unroll
    for (int column = 0; column < columns; column += kSlab) {
      cute::SM90_TMA_LOAD_4D::PREFETCH::copy(&map, column, row_in_page, unit.kv_head, page);
    }
  }

  // Asks for first keys and values in the L2 cache, while the launch before this one ends. That may change them, which L2
  // then knows, and the block table: then other pages were asked for, or none. Pages of a block are looked up together, by
  // one lane: not where they are small and many.
  __device__ __forceinline__ void prefetch(const Unit& unit) {
    const int last_key = min(unit.last_key, unit.first_key + params.prefetched_keys);
    for (int key = unit.first_key; key < last_key && kShortBox <= 1 << params.box_shift; key += kBlockN) {
      int pages[kBlockN / kShortBox], rows[kBlockN / kShortBox];
#pragma unroll
      for (int i = 0; i < kBlockN / kShortBox; ++i) {
        const int own = key + (i << params.box_shift), row = unit.sequence.first + own;
        const int entry = params.page_size.divide(row);
        const bool seen = own < unit.last_key && own < key + kBlockN;
        rows[i] = row - entry * params.page_size.value;
        pages[i] = seen ? __ldcg(params.block_table + unit.batch * params.block_table_stride + entry) : -1;
      }
#pragma unroll
      for (int i = 0; i < kBlockN / kShortBox; ++i) {
        if (pages[i] >= 0) {
          prefetch<kHeadDimPadded>(params.k, unit, rows[i], pages[i]);
          prefetch<kHeadDimVPadded>(params.v, unit, rows[i], pages[i]);
        }
      }
    }
  }
