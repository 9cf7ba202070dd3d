    if (threadIdx.x / 32 == 1) {
      schedule_tiles(params, shared);
    }
