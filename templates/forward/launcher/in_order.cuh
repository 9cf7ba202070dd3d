  const int m_blocks = int(ceil_div(a.seqlen_q, kBlockM));
  params.m_blocks = FastDivisor(m_blocks);
  params.slots = m_blocks * a.heads * a.batch;
  const int grid = std::min(params.slots, multiprocessors);
