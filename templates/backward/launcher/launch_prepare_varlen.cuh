  by_heads(params, a.heads, [&](int heads) {
    prepare_rows<<<dim3(m_slots + 1, heads), kRowThreads, 0, stream>>>(params);  // the first lists tiles
  });
