  // One box per slab; rows past the sequence and columns past the head dim are filled with zeros.
  template <int columns, int rows, int slab>
  __device__ __forceinline__ void copy(const CUtensorMap& map, TransactionBarrier& full, Element* tile, int row,
                                       int head, int seqlen, int end, cute::TMA::CacheHintSm90 hint) {
#pragma unroll 1  // few registers
    for (int column = 0; column < columns; column += slab) {
      cute::SM90_TMA_LOAD_5D::copy(&map, reinterpret_cast<uint64_t*>(&full), static_cast<uint64_t>(hint),
                                   tile + column * rows, column, kRagged - seqlen + row, head, kRagged, end);
    }
  }

  // A tile's keys, which nobody needs again.
  template <int columns, int slab>
  __device__ __forceinline__ void copy_keys(const CUtensorMap& map, TransactionBarrier& full, Element* to, const Tile& tile) {
    copy<columns, kBlockN, slab>(map, full, to, tile.first_key, tile.kv_head, shared.sequence.seqlen_k, shared.sequence.end_k,
                                 cute::TMA::CacheHintSm90::EVICT_FIRST);
  }
