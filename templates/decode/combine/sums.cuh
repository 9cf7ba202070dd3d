  // The sum of P of a row, by all threads that have a part of it.
  __device__ __forceinline__ void add_up_sums() {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < kRows / 4; ++j) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], step);
      }
      if (lane() < 4) {
        shared.sums[warp][column_at(j)] = sum[j];
      }
    }
    meet();
  }
