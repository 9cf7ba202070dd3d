// Adds a part of a block's dQ, or stores the first one, so that nobody has to clear the sums.
__device__ __forceinline__ void add(float* to, const float* from, int count, int turn) {
  if (turn == 0) {
    bulk_store(to, from, count * sizeof(float));
  } else {
    bulk_add(to, from, count * sizeof(float));
  }
}
