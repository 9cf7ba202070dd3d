  // Where a sequence ends, and how many rows it has.
  struct Rows {
    int seqlen, end;
  };

  __device__ __forceinline__ static Rows of_q(const Tile& tile) { return {tile.sequence.seqlen_q, tile.sequence.end_q}; }
  __device__ __forceinline__ static Rows of_k(const Tile& tile) { return {tile.sequence.seqlen_k, tile.sequence.end_k}; }

  // One box per slab; rows past the sequence, though another begins there, and columns past the head dim are filled with
  // zeros.
  template <int columns, int rows, int slab>
  __device__ __forceinline__ void copy(const CUtensorMap& map, TransactionBarrier& full, Element* tile, int row,
                                       int head, Rows sequence, cute::TMA::CacheHintSm90 hint) {
    full.arrive_and_expect_tx(rows * columns * sizeof(Element));
#pragma unroll kUnrolledCopies
    for (int column = 0; column < columns; column += slab) {
      cute::SM90_TMA_LOAD_5D::copy(&map, reinterpret_cast<uint64_t*>(&full), static_cast<uint64_t>(hint),
                                   tile + column * rows, column, kRagged - sequence.seqlen + row, head, kRagged,
                                   sequence.end);
    }
  }
