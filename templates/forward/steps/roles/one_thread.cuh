    if (threadIdx.x == 0) {
      produce(params, shared);
    }
