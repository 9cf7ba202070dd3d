  // Whether no row of a tile sees a key: of the first ones, or of the last ones.
  const auto is_empty = [&](int m_block) {
    const int first_row = m_block * params.tile_queries.value;
    const Blocks blocks = blocks_of(params, first_row, first_row + params.tile_queries.value - 1);
    return blocks.last <= blocks.first;
  };
  params.has_empty_tiles = is_empty(0) || is_empty(m_blocks - 1);
