  // Ping-pong: while one warpgroup has the tensor cores, the others do softmax. A turn ends when GEMMs are issued, before
  // any wait for Q; a block that is skipped has its turn too. Only in tiles of which all have rows, each of which has as
  // many turns for one as for another.
  __device__ __forceinline__ void begin_turn(const Tile& tile) {
    if (tile.warpgroups == kConsumers) {
      barrier_sync(kScheduler + warpgroup, 2 * kWarpgroup);
    }
  }
  __device__ __forceinline__ void end_turn(const Tile& tile) {
    if (tile.warpgroups == kConsumers) {
      pass_on_turn();
    }
  }
