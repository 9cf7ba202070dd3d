  if (m_blocks > 0) {
    by_heads(params, a.heads, a.batch, [&](int heads, int batches) {
      round_dq<<<dim3(m_blocks, heads, batches), kRowThreads, 0, stream>>>(params);
    });
  }
