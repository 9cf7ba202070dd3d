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
