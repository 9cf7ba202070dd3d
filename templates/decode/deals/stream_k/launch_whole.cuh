  // Tiles that are alike stay whole, as many in each run. What is left are tiles of some runs, one more in each, if they are
  // enough for memory to be busy, as fewer thread blocks that have an SM each are; of runs that have no others, not if some
  // SMs would have two.
  const int64_t left = groups % most_runs;
  const bool enough = left == 0 || left * 10 > sm_runs * (kBlocks == 1 ? 5 : 7), shared = left > sm_runs && left * 4 <= sm_runs * 5;
  if (alike && units > 0 && enough && !(groups < most_runs && shared)) {
    params.of_run = int(groups / most_runs);
    longer_runs = left;
    whole_groups = groups;
    runs = std::min(groups, most_runs);
  }
