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
  // Tiles that are alike stay whole, as many in each run, where few thread blocks are left out then.
  const int64_t of_run = (groups + most_runs - 1) / most_runs;
  const int64_t whole_runs = of_run > 0 ? (groups + of_run - 1) / of_run : 0;
  const bool most_have_one = whole_runs * 10 >= most_runs * 7 && whole_runs * abreast * 10 >= multiprocessors * 9;
  params.whole = alike && units > 0 && most_have_one;
  // no run lacks a tile of its group
  const int64_t grid = params.whole ? whole_runs * abreast : std::min<int64_t>(units, most - most % abreast);
  const int64_t runs = grid / abreast;
  params.level = params.whole || (runs > 0 && (groups + runs - 1) / runs * runs <= groups + groups / 16);
