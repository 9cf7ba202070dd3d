__device__ __forceinline__ float largest(const Values& y) {
  float top = 0.0f;
#pragma unroll
  for (int h = 0; h < kHeight; ++h) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        top = fmaxf(top, fabsf(y[h][i][e]));
      }
    }
  }
  return top;
}
