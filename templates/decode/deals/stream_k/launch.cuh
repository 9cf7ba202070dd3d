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
  params.of_run = params.longer_runs = 0;
  int64_t runs = most_runs, whole_groups = 0;
