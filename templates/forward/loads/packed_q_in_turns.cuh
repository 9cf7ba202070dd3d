  uint32_t turns = 0;  // of warpgroups, each for its rows of Q

  __device__ __forceinline__ void load_q(const Tile& tile) {
    if (turns == 0) {
      clear_unused_rows();
    }
    // The rows of each warpgroup that has some, as soon as it has read its last ones.
#pragma unroll 1
    for (int i = 0; i < tile.warpgroups; ++i, ++turns) {
      const uint32_t consumer = turns % kConsumers, round = turns / kConsumers;
      const uint32_t stage = round % kQStages, phase = round / kQStages % 2;
      shared.q_empty[stage][consumer].wait(phase ^ 1);
      copy_q(shared.q_full[stage][consumer], shared.q[stage] + consumer * kWarpgroupRows * kHeadDimPadded,
             tile.first_row + i * params.queries, tile.head, of_q(tile));
    }
  }
