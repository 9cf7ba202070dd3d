  if (warp == kPrefetchWarp) {
    Producer{params, shared}.prefetch_first();
  }
