  uint32_t tiles = 0;  // whose Q was loaded

  __device__ __forceinline__ void load_q(const Tile& tile) {
    if (tiles == 0) {
      clear_unused_rows();
    }
    const uint32_t stage = tiles % kQStages, phase = tiles / kQStages % 2;
    // Each warpgroup's rows as soon as it has read its last ones.
#pragma unroll kUnrolledCopies
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      shared.q_empty[stage][consumer].wait(phase ^ 1);
      copy_q(shared.q_full[stage][consumer], shared.q[stage] + consumer * kWarpgroupRows * kHeadDimPadded,
             tile.first_row + consumer * params.queries, tile.head, of_q(tile));
    }
    ++tiles;
  }
