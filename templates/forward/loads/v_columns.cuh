  // V lies transposed: its rows are columns of keys.
  __device__ __forceinline__ void load_v(const Tile& tile, int block) {
    shared.v_empty[v.stage].wait(v.phase ^ 1);
    TransactionBarrier& full = shared.v_full[v.stage];
    full.arrive_and_expect_tx(kHeadDimVPadded * kBlockN * sizeof(Element));
#pragma unroll
    for (int key = 0; key < kBlockN; key += kVSlab) {
      cute::SM90_TMA_LOAD_4D::copy(&params.v, reinterpret_cast<uint64_t*>(&full),
                                   static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST),
                                   shared.v[v.stage] + key * kHeadDimVPadded, block * kBlockN + key, 0, tile.kv_head,
                                   tile.batch);
    }
    v.advance();
  }
