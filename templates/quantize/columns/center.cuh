// Takes off the means of columns.
__device__ __forceinline__ void center(const Columns& columns, Values& y) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    float mean[8];
    read(columns.means, i, mean);
#pragma unroll
    for (int h = 0; h < kHeight; ++h) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        y[h][i][e] = fmaf(y[h][i][e], kNorm, -mean[e]);
      }
    }
  }
}
