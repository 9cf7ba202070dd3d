  params.tiles = int(tiles);
  const int grid = m_blocks > 0 ? int(std::min<int64_t>(tiles, multiprocessors)) : int(tiles);
