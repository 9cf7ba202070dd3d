  if (threadIdx.x == 0) {
    shared.sequence = sequence_of(params, found.batch);
  }
