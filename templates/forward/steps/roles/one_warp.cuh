    if (threadIdx.x / 32 == 0) {
      produce(params, shared);
    }
