  // Which sequence a tile is of, to TMA.
  __device__ __forceinline__ static int of_q(const Tile& tile) { return tile.batch; }
  __device__ __forceinline__ static int of_k(const Tile& tile) { return tile.batch; }

  // One box per slab; rows past the sequence and columns past the head dim are filled with zeros.
  template <int columns, int rows, int slab>
  __device__ __forceinline__ void copy(const CUtensorMap& map, TransactionBarrier& full, Element* tile, int row,
                                       int head, int batch, cute::TMA::CacheHintSm90 hint) {
    full.arrive_and_expect_tx(rows * columns * sizeof(Element));
#pragma unroll kUnrolledCopies
    for (int column = 0; column < columns; column += slab) {
      cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&full), static_cast<uint64_t>(hint),
                                   tile + column * rows, column, row, head, batch);
    }
  }
