  // Behind V: how many parts of a tile's rows have ended, which that kernel zeroes, and what they leave.
  params.parts_ended = reinterpret_cast<uint32_t*>(params.v_columns + int64_t(a.batch) * a.kv_heads * kHeadDimV * padded);
  params.partials = reinterpret_cast<float4*>(params.parts_ended + kPartCounters);
