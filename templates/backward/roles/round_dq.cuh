    if (threadIdx.x / 32 == kDqAdders + 1) {
      Rounder{params, shared}.run();
    }
