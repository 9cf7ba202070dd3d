  params.cut = deal.cut;
  const int cut_blocks = deal.cut > 0 ? std::clamp(int(ceil_div(seen_by(params, deal.cut * kBlockM - 1).last, tile_blocks * kBlockN)), 0, n_blocks) : 0;
