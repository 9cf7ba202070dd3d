  if (m_blocks > 0) {
    by_heads(params, a.heads, a.batch, [&](int heads, int batches) {
      prepare_rows<<<dim3(m_blocks, heads, batches), kRowThreads, 0, stream>>>(params);
    });
  }
