  // Ping-pong: while one warpgroup has the tensor cores, the others do softmax. A turn ends when GEMMs are issued, before
  // any wait for Q; a block that is skipped has its turn too.
  __device__ __forceinline__ void begin_turn(const Tile&) { barrier_sync(kScheduler + warpgroup, 2 * kWarpgroup); }
  __device__ __forceinline__ void end_turn(const Tile&) { pass_on_turn(); }
