  // much of it delays the first loads, which few units do not make up for
  params.prefetched_keys = (units < 3 * grid ? 1 : kStages / 2) * kBlockN;
