  params.kv_head_tiles = FastDivisor(m_blocks * (a.heads / a.kv_heads));
  params.split_tiles = FastDivisor(m_blocks * a.heads * a.batch);
  params.slots = int(ceil_div(blocks, params.split_blocks)) * params.split_tiles.value;
  const int grid = std::min(params.slots, multiprocessors);
