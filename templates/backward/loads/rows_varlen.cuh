  // A block of rows, which tiles of other keys need too.
  template <int columns, int slab>
  __device__ __forceinline__ void copy_rows(const CUtensorMap& map, TransactionBarrier& full, Element* to, const Tile&, int head, int block) {
    copy<columns, kBlockM, slab>(map, full, to, block * kBlockM, head, shared.sequence.seqlen_q, shared.sequence.end_q,
                                 cute::TMA::CacheHintSm90::EVICT_LAST);
  }
