  // Row-major, for the transposers.
  __device__ __forceinline__ void load_v(const Tile& tile, int block) {
    shared.v_rows_empty[v.stage].wait(v.phase ^ 1);
    copy<kHeadDimVPadded, kBlockN, kVRowsSlab>(params.v, shared.v_rows_full[v.stage], shared.v_rows[v.stage], block * kBlockN,
                                               tile.kv_head, of_k(tile), cute::TMA::CacheHintSm90::EVICT_LAST);
    v.advance();
  }
