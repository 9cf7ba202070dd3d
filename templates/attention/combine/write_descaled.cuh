  const float low = plus(times(average(total[0], inverse), factor.x), mean.x);
  const float high = plus(times(average(total[1], inverse), factor.y), mean.y);
  OutElement* const out =
      params.out + batch * params.out_stride_batch + position * params.out_stride_seq + head * params.out_stride_head + column;
  __stcg(reinterpret_cast<uint32_t*>(out), pack(low, high));
