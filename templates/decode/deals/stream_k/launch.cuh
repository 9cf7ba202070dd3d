  const int most = multiprocessors * kBlocks;
  int abreast = std::min({8, params.split_units, most});
  while (params.split_units % abreast) {
    --abreast;
  }
  params.abreast = FastDivisor(abreast);
  params.tile_groups = FastDivisor(params.split_units / abreast);
  if (int64_t(params.split_units) * a.batch * (blocks_of(params.seqlen_k, kBlockN) + kNumSplits) >= 1 << 30) {
    return kTooMany;
  }
  const bool alike = !a.seqused_k && !a.leftpad_k;
  const int64_t groups = int64_t(params.tile_groups.value) * a.batch, most_runs = most / abreast;
  const int64_t sm_runs = multiprocessors / abreast;  // of as many thread blocks as there are multiprocessors
  // Tiles that are alike stay whole, as many in each run. What is left are tiles of some runs, one more in each, if they are
  // enough for memory to be busy; of runs that have no others, not if some multiprocessors would have two.
  const int64_t left = groups % most_runs;
  const bool enough = left == 0 || left * 10 >= sm_runs * 7, shared = left > sm_runs && left * 4 <= sm_runs * 5;
  params.of_run = params.longer_runs = 0;
  int64_t runs = most_runs, whole_groups = 0;
  if (alike && units > 0 && enough && !(groups < most_runs && shared)) {
    params.of_run = int(groups / most_runs);
    params.longer_runs = int(left);
    whole_groups = groups;
    runs = std::min(groups, most_runs);
  }
