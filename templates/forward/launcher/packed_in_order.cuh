  const int m_blocks = int(ceil_div(a.seqlen_q, params.tile_queries.value));
  params.m_blocks = FastDivisor(m_blocks);
  params.slots = m_blocks * packs * a.batch;
  const int grid = std::min(params.slots, multiprocessors);
