  const float2 factor = of_columns(params.v_scale, 1.0f);
  const float2 mean = sum == 0.0f ? float2() : of_columns(params.v_mean, 0.0f);  // of no key nothing
