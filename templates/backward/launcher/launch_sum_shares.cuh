  if (tiles > 0 && params.shares > 1) {
    by_heads(params, a.kv_heads, a.batch, [&](int heads, int batches) {
      sum_shares<<<dim3(ceil_div(std::min(a.seqlen_k, params.kept_keys), kWarpgroupRows), heads, batches), kRowThreads, 0, stream>>>(params);
    });
  }
