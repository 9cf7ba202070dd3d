  const float2 factor = of_columns(params.v_scale, 1.0f);
  const float2 mean = sum == 0.0f ? float2() : of_columns(params.v_mean, 0.0f);  // of no key nothing
  const float low = plus(times(average(total[0], inverse), factor.x), mean.x);
  const float high = plus(times(average(total[1], inverse), factor.y), mean.y);
  OutElement* const out =
      params.out + batch * params.out_stride_batch + position * params.out_stride_seq + head * params.out_stride_head + column;
  __stcg(reinterpret_cast<uint32_t*>(out), pack(low, high));
  if (column == 0 && params.lse) {
    params.lse[batch * params.lse_stride_batch + head * params.lse_stride_head + position] =
        plus(plus(times(reference, scale), log_above(sum)), of_mean);
  }
