  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *params.tiles_drawn = 0;
  }
