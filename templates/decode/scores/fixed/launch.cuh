  params.inverse_scale = 1.0f / a.scale;
