  const int m_blocks = int(ceil_div(a.seqlen_q, kBlockM)), blocks = int(ceil_div(a.seqlen_k, kBlockN));
