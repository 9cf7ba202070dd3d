  Element* const out =
      params.out + batch * params.out_stride_batch + position * params.out_stride_seq + head * params.out_stride_head + column;
  __stcg(reinterpret_cast<uint32_t*>(out), pack(average(total[0], inverse), average(total[1], inverse)));
