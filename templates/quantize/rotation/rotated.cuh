  rotate(params, raw, y);
