  uint32_t tiles = 0;  // whose Q was loaded
  int q_missing;       // warpgroups whose rows of the next are still to be loaded, the last first

  __device__ __forceinline__ void load_rows_of_q(const Tile& tile) {
    const uint32_t stage = tiles % kQStages, phase = tiles / kQStages % 2;
    const int consumer = --q_missing;
    shared.q_empty[stage][consumer].wait(phase ^ 1);
    copy<kHeadDimPadded, kWarpgroupRows, kQkSlab>(
        params.q, shared.q_full[stage][consumer], shared.q[stage] + consumer * kWarpgroupRows * kHeadDimPadded,
        tile.first_row + consumer * kWarpgroupRows, tile.head, of_q(tile), cute::TMA::CacheHintSm90::EVICT_FIRST);
    tiles += consumer == 0;
  }

  // The lower a warpgroup's rows, the sooner it begins a tile and ends it: each one's Q comes just before the first block
  // that it sees, and waits for nobody else's.
  __device__ __forceinline__ void load_q(const Tile& tile) {
    q_missing = kConsumers;
    load_rows_of_q(tile);
  }
