// Which tiles somebody takes.
struct Order {
  int index = taker();

  __device__ __forceinline__ void advance() { index += takers(); }
};
