  const auto seen_end = [&](int m_block) {  // of a tile
    return blocks_of(params, m_block * kBlockM, m_block * kBlockM + kBlockM - 1).last;
  };
  const auto units_of = [&](int split_blocks) {
    int64_t units = 0;
    for (int m_block = 0; m_block < m_blocks; ++m_block) {
      units += ceil_div(seen_end(m_block), split_blocks);
    }
    return units * a.heads * a.batch;
  };
