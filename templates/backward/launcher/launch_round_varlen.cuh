  if (m_slots > 0) {
    const int summed = params.most_kept > 0 ? params.most_tiles : 0;  // what a tile may have a part of
    by_heads(params, a.heads, [&](int heads) {
      round_dq<<<dim3(summed + m_slots, heads), kRowThreads, 0, stream>>>(params);
    });
  }
