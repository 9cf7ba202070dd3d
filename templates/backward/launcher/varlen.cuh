  // How many blocks there are the GPU finds out: there is a thread block for each slot of one.
  const int m_slots = a.total_q ? int(ceil_div(a.total_q, kBlockM)) + a.offsets : 0;
  const int n_slots = a.total_k ? int(ceil_div(a.total_k, kBlockN)) + a.offsets : 0;
  const int64_t tiles = int64_t(n_slots) * a.kv_heads;
  if (m_slots == 0 && tiles == 0) {
    return kOk;
  }
  params.m_slots = m_slots;
  params.n_slots = n_slots;
  const int grid = int(tiles);
