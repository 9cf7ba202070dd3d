  params.inverse_scale = 1.0f / params.scale;  // of scores, for what is given is about as large as these
