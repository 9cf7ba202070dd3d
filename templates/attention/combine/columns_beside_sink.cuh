  const float2 factor = of_columns(params.v_scale, 1.0f), taken_off = of_columns(params.v_mean, 0.0f);
  const float share = times(of_keys, inverse);  // the weights of keys add up to less than one
  const float2 mean = {times(taken_off.x, share), times(taken_off.y, share)};
