  float old;
  combine_sink(params.sink(own.head), maximum, sum, old);
#pragma unroll
  for (int k = 0; k < kLoads; ++k) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      total[k][j] = times(total[k][j], old);
    }
  }
