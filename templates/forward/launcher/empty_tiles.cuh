  // Whether no row of a tile sees a key: of the first ones, or of the last ones.
  const auto is_empty = [&](int m_block) {
    const Blocks blocks = blocks_of(params, m_block * kBlockM, m_block * kBlockM + kBlockM - 1);
    return blocks.last <= blocks.first;
  };
  params.has_empty_tiles = is_empty(0) || is_empty(m_blocks - 1);
