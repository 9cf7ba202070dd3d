  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < kPartCounters; i += blockDim.x) {
      params.parts_ended[i] = 0;
    }
  }
