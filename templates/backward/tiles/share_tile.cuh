  if (threadIdx.x == 0) {
    shared.tile = found;
  }
