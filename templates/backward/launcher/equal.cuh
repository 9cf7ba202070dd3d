  const int heads_of_share = share_heads(a), shares = shares_of(a, heads_of_share);
  const int m_blocks = int(ceil_div(a.seqlen_q, kBlockM)), n_blocks = int(ceil_div(a.seqlen_k, tile_blocks * kBlockN));
  const int64_t tiles = int64_t(n_blocks) * a.kv_heads * a.batch * shares;
  if (m_blocks == 0 && tiles == 0) {
    return kOk;
  }
  params.key_blocks = reinterpret_cast<KeyBlock*>(params.row_blocks + int64_t(a.batch) * a.heads * m_blocks);
  params.shares = shares;
  params.share_heads = heads_of_share;
  params.m_blocks = m_blocks;
  params.n_blocks = n_blocks;
  params.batch_shares = FastDivisor(a.kv_heads * shares);
  params.shares_divisor = FastDivisor(shares);
