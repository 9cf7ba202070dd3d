  const Deal deal = deal_of(a);
  const int shares = shares_of(a, deal.heads);
  const int m_blocks = int(ceil_div(a.seqlen_q, kBlockM)), n_blocks = int(ceil_div(a.seqlen_k, tile_blocks * kBlockN));
  params.cut = deal.cut;
  const int cut_blocks = deal.cut > 0 ? std::clamp(int(ceil_div(seen_by(params, deal.cut * kBlockM - 1).last, tile_blocks * kBlockN)), 0, n_blocks) : 0;
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
