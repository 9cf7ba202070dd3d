  const int m_blocks = int(ceil_div(a.seqlen_q, kBlockM));
  params.m_blocks = FastDivisor(m_blocks);
  const int tiles = m_blocks * a.heads * a.batch;
