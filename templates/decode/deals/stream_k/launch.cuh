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
  const int64_t grid = std::min<int64_t>(units, most - most % abreast);  // no run lacks a tile of its group
  const int64_t groups = int64_t(params.tile_groups.value) * a.batch, runs = grid / abreast;
  const bool alike = !a.seqused_k && !a.leftpad_k;
  params.level = runs > 0 && (groups + runs - 1) / runs * runs <= groups + groups / 16;
  params.whole = params.level && alike;
