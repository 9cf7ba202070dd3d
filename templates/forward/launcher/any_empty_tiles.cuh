  params.has_empty_tiles = true;  // perhaps: the GPU alone knows
