  params.whole_groups = int(whole_groups);
  params.whole_rows = int(whole_groups / params.tile_groups.value * a.seqlen_q * a.heads);
  params.whole = whole_groups > 0 && whole_groups == groups;
  // no run lacks a tile of its group
  const int64_t grid = whole_groups > 0 ? runs * abreast : std::min<int64_t>(units, runs * abreast);
  runs = std::max<int64_t>(1, grid / abreast);
  params.shorter_runs = int(runs - longer_runs);
  params.level = grid >= abreast && (groups + runs - 1) / runs * runs <= groups + groups / 16;
