  if (column == 0 && params.lse) {
    params.lse[batch * params.lse_stride_batch + head * params.lse_stride_head + position] =
        plus(times(reference, params.scale), log_above(sum));
  }
