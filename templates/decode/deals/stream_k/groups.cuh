  const int64_t groups = int64_t(params.tile_groups.value) * a.batch, most_runs = most / abreast;
  const int64_t sm_runs = multiprocessors / abreast;  // of as many thread blocks as there are multiprocessors
  params.of_run = params.longer_runs = 0;
  int64_t runs = most_runs, whole_groups = 0;
