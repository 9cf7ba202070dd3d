  // The boxes of a warpgroup's rows of Q from a query on: of each query the heads that share a tile's rows, side by side.
  __device__ __forceinline__ void copy_q(TransactionBarrier& full, Element* rows, int query, int head, Rows sequence) {
    full.arrive_and_expect_tx(params.pack.value * params.queries * kHeadDimPadded * sizeof(Element));
#pragma unroll kUnrolledCopies
    for (int column = 0; column < kHeadDimPadded; column += kQkSlab) {
      cute::SM90_TMA_LOAD_5D::copy(&params.q, reinterpret_cast<uint64_t*>(&full),
                                   static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST),
                                   rows + column * kWarpgroupRows, column, head * params.pack.value,
                                   kRagged - sequence.seqlen + query, kRagged, sequence.end);
    }
  }
