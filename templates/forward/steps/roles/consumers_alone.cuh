  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroup, 0);  // known to be uniform
  Consumer consumer{params, shared, warpgroup};
  consumer.run();
