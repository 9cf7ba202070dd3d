  if (warp == kPrefetchWarp) {
    Producer{params, shared}.prefetch();
  }
