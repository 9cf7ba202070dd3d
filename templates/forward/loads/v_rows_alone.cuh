  // Row-major, into the one buffer of the transposers: of an even number of stages, each other one has it in the same phase.
  __device__ __forceinline__ void load_v(const Tile& tile, int block) {
    shared.v_rows_empty.wait(v.stage % 2 ^ 1);
    copy<kHeadDimVPadded, kBlockN, kVRowsSlab>(params.v, shared.v_rows_full, shared.v_rows, block * kBlockN, tile.kv_head,
                                               of_k(tile), cute::TMA::CacheHintSm90::EVICT_LAST);
    v.advance();
  }
