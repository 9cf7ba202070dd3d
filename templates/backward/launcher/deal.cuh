  const Deal deal = deal_of(a);
  const int shares = shares_of(a, deal.heads);
  const int m_blocks = int(ceil_div(a.seqlen_q, kBlockM)), n_blocks = int(ceil_div(a.seqlen_k, tile_blocks * kBlockN));
