  const int m_blocks = int(ceil_div(a.seqlen_q, kBlockM)), blocks = int(ceil_div(a.seqlen_k, kBlockN));
  params.split_blocks = std::max(1, int(ceil_div(blocks, kNumSplits)));
  params.kv_head_tiles = FastDivisor(m_blocks * (a.heads / a.kv_heads));
  params.split_tiles = FastDivisor(m_blocks * a.heads * a.batch);
  params.slots = int(ceil_div(blocks, params.split_blocks)) * params.split_tiles.value;
  const int grid = std::min(params.slots, multiprocessors);
