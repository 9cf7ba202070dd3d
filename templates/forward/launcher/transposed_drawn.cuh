  // Behind V, for that kernel zeroes it; so the workspace may hold anything.
  params.tiles_drawn = reinterpret_cast<uint32_t*>(params.v_columns + int64_t(a.batch) * a.kv_heads * kHeadDimV * padded);
