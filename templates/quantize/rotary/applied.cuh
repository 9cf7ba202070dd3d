  apply_rotary(params, tile.batch, first, pass, raw);
