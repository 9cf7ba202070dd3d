    if (threadIdx.x % 32 == 0 && threadIdx.x <= 32 * kDqAdders) {
      add_dq(params, shared, threadIdx.x / 32 - 1);
    }
