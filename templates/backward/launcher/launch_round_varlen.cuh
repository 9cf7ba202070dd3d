  if (m_slots > 0) {
    const int summing = std::min(256, params.most_kept);  // thread blocks of a head
    by_heads(params, a.heads, [&](int heads) {
      round_dq<<<dim3(summing + m_slots, heads), kRowThreads, 0, stream>>>(params);
    });
  }
