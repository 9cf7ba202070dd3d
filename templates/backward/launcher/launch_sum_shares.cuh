  if (tiles > 0 && shares > 1) {
    by_heads(params, a.kv_heads, a.batch, [&](int heads, int batches) {
      sum_shares<<<dim3(ceil_div(a.seqlen_k, kWarpgroupRows), heads, batches), kRowThreads, 0, stream>>>(params);
    });
  }
