  if (m_slots > 0) {
    by_heads(params, a.heads, [&](int heads) {
      prepare_rows<<<dim3(m_slots, heads), kRowThreads, 0, stream>>>(params);
    });
  }
