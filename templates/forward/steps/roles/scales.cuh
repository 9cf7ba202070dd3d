    if (threadIdx.x / 32 == 1) {
      produce_scales(params, shared);
    }
