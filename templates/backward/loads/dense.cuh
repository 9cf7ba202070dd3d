  // One box per slab; rows past the sequence and columns past the head dim are filled with zeros.
  template <int columns, int rows, int slab>
  __device__ __forceinline__ void copy(const CUtensorMap& map, TransactionBarrier& full, Element* tile, int row,
                                       int head, int batch, cute::TMA::CacheHintSm90 hint) {
#pragma unroll 1  // few registers
    for (int column = 0; column < columns; column += slab) {
      cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&full), static_cast<uint64_t>(hint),
                                   tile + column * rows, column, row, head, batch);
    }
  }

  // A tile's keys, which nobody needs again.
  template <int columns, int slab>
  __device__ __forceinline__ void copy_keys(const CUtensorMap& map, TransactionBarrier& full, Element* to, const Tile& tile) {
    copy<columns, kBlockN, slab>(map, full, to, tile.first_key, tile.kv_head, tile.batch, cute::TMA::CacheHintSm90::EVICT_FIRST);
  }
