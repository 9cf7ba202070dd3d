  params.prefetched_keys = params.whole_groups > 0 || !alike ? kStages / 2 * kBlockN : 0;
