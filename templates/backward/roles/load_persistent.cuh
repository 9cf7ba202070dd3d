    if (threadIdx.x == 0) {
      Loader{params, shared}.run();
    }
