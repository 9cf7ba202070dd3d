  const int m_blocks = int(ceil_div(a.seqlen_q, kBlockM));
  params.m_pairs = FastDivisor(int(ceil_div(m_blocks, kCluster)));
  params.slots = params.m_pairs.value * a.heads * a.batch;  // of one tile for each block
  const int grid = kCluster * std::min(params.slots, multiprocessors / kCluster);
