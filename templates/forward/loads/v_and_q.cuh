  __device__ __forceinline__ void load_v(const Tile& tile, int block) {
    shared.v_empty[v.stage].wait(v.phase ^ 1);
    copy<kHeadDimVPadded, kBlockN, kVSlab>(params.v, shared.v_full[v.stage], shared.v[v.stage], block * kBlockN,
                                           tile.kv_head, of_k(tile), cute::TMA::CacheHintSm90::EVICT_LAST);
    v.advance();
    while (q_missing > 0) {
      load_rows_of_q(tile);
      if (block > tile.blocks.first) {
        break;
      }
    }
  }
