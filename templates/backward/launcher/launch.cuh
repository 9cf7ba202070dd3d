  if (tiles > 0) {
    attention_backward<<<grid, kThreads, shared_bytes, stream>>>(params);
  }
