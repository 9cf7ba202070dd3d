  const int64_t rows = int64_t(a.batch) * a.seqlen_q * a.heads;
  params.shares = reinterpret_cast<Share*>(params.partials + rows * kNumSplits * kHeadDimV);
