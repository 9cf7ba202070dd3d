  const int64_t tiles = int64_t(n_blocks + cut_blocks) * a.kv_heads * a.batch * shares;
  if (m_blocks == 0 && tiles == 0) {
    return kOk;
  }
  params.key_blocks = reinterpret_cast<KeyBlock*>(params.row_blocks + int64_t(a.batch) * a.heads * m_blocks);
  params.shares = cut_blocks > 0 ? 2 * shares : shares;
  params.share_heads = deal.heads;
  params.m_blocks = m_blocks;
  params.n_blocks = n_blocks;
  params.batch_shares = FastDivisor(a.kv_heads * shares);
  params.shares_divisor = FastDivisor(shares);
