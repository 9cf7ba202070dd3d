  if (column == 0 && params.lse) {
    params.lse[batch * params.lse_stride_batch + head * params.lse_stride_head + position] = plus(base, log_above(sum));
  }
