__device__ __forceinline__ void widen(const Raw& raw, Values& y) {
#pragma unroll
  for (int h = 0; h < kHeight; ++h) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const Pair pair = reinterpret_cast<const Pair&>(raw[h][i][word]);
        y[h][i][2 * word] = float(pair.x);
        y[h][i][2 * word + 1] = float(pair.y);
      }
    }
  }
}
