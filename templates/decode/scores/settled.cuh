  // P of a step's scores. Where one outgrows its reference, all find their maxima first.
  __device__ __forceinline__ void softmax(const Unit& unit, int key, Scores& s) {
    if (key == unit.first_key || meet_and_vote(outgrown(s))) {
      settle(s);
    }
    Statistics added = {};
    exponentiate(s, added);
    cutlass::arch::fence_view_async_shared();
    meet();
#pragma unroll
    for (int j = 0; j < kRows / 4; ++j) {
      sum[j] += added[j];  // as speculation does: the same bits
    }
  }
