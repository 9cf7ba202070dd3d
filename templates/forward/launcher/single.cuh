  const int rows = m_blocks, in_round = grid;  // of slots: for each head, and that are in work
