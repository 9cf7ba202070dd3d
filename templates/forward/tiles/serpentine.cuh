// Which tiles somebody takes, in serpentine order: who has the longest of one round gets the shortest of the next.
struct Order {
  int index = taker();
  int round = 0;

  __device__ __forceinline__ void advance() {
    round += 1;
    index = round * takers() + (round % 2 == 0 ? taker() : takers() - 1 - taker());
  }
};
