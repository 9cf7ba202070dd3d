  const auto units_of = [&](int split_blocks) {
    return int64_t(m_blocks) * a.heads * a.batch * ceil_div(blocks, split_blocks);
  };
