  params.m_blocks = m_blocks;
  params.flat_heads = FastDivisor(a.heads * a.batch);
  params.slots = 0;
  int first = 0;
  for (int split = 0; split < kNumSplits; ++split) {
    while (first < m_blocks && seen_end(first) <= split * params.split_blocks) {
      ++first;
    }
    params.first_seeing[split] = first;
    params.slots += (m_blocks - first) * params.flat_heads.value;
  }
  const int grid = std::min(params.slots, multiprocessors);
