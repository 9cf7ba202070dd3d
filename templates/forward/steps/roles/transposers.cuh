    if (threadIdx.x >= kWarpgroup - 32 * kTransposers) {
      produce_transposed_v(params, shared);
    }
