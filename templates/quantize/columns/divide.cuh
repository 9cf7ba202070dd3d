// Divides columns by their descales.
__device__ __forceinline__ void divide(const Columns& columns, Values& y) {
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    float scale[8];
    read(columns.scales, i, scale);
#pragma unroll
    for (int h = 0; h < kHeight; ++h) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        y[h][i][e] *= scale[e];
      }
    }
  }
}
