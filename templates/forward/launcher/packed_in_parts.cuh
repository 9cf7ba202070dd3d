  const int m_blocks = int(ceil_div(a.seqlen_q, params.tile_queries.value));
  params.m_blocks = FastDivisor(m_blocks);
  const int tiles = m_blocks * packs * a.batch;
