  __device__ __forceinline__ void load_k(const Tile& tile, int block) {
    shared.k_empty[k.stage].wait(k.phase ^ 1);
    copy<kHeadDimPadded, kBlockN, kQkSlab>(params.k, shared.k_full[k.stage], shared.k[k.stage], block * kBlockN,
                                           tile.kv_head, of_k(tile), cute::TMA::CacheHintSm90::EVICT_LAST);
    k.advance();
  }
