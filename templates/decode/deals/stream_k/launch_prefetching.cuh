  params.prefetched_keys = params.whole || !alike ? kStages / 2 * kBlockN : 0;
