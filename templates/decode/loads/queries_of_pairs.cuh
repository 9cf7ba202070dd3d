  // Rows of queries, those of a KV head after those of the other: a box has its heads side by side. It may reach into the
  // next group's.
  __device__ __forceinline__ void load_q(const Unit& unit) {
    TransactionBarrier& full = shared.q_full[q.stage];
    shared.q_empty[q.stage].wait(q.phase ^ 1);
    full.arrive_and_expect_tx(params.q_bytes);
#pragma unroll
    for (int own = 0; own < kKvHeads; ++own) {
#pragma unroll
      for (int column = 0; column < kHeadDimPadded; column += kSlab) {
        cute::SM90_TMA_LOAD_4D::copy(&params.q, reinterpret_cast<uint64_t*>(&full),
                                     static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST),
                                     shared.q[q.stage] + (own * kHeadDimPadded + column) * kOwnRows, column,
                                     first_head_of(params, unit, own), unit.first_position, unit.batch);
      }
    }
    q.advance();
  }
