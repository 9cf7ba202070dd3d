  const int m_blocks = int(ceil_div(a.seqlen_q, kBlockM)), blocks = int(ceil_div(a.seqlen_k, kBlockN));
  params.chunk_blocks = std::max(1, int(ceil_div(blocks, kChunks)));
  params.kv_head_tiles = FastDivisor(m_blocks * (a.heads / a.kv_heads));
  params.chunk_tiles = FastDivisor(m_blocks * a.heads * a.batch);
  params.slots = int(ceil_div(blocks, params.chunk_blocks)) * params.chunk_tiles.value;
  const int grid = std::min(params.slots, multiprocessors);
