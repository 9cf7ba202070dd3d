  const int m_blocks = int(ceil_div(a.seqlen_q, kBlockM));
  params.m_pairs = int(ceil_div(m_blocks, kCluster));
  const int rows = params.m_pairs;  // of slots, for each head
  const int in_round = std::min(rows * a.heads * a.batch, multiprocessors / kCluster);
  const int grid = kCluster * in_round;
