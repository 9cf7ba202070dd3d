  params.cu_seqlens_q = a.offsets > 0 ? static_cast<const int32_t*>(a.cu_seqlens_q) : nullptr;
  params.batch = std::max(0, a.offsets - 1);
  // How many tiles there are the GPU finds out: no more than these, of which each offset may add a part.
  const int64_t most_tiles = (ceil_div(a.total_q, kBlockM) + a.offsets) * a.heads;
  const int grid = int(std::min<int64_t>(most_tiles, multiprocessors));
