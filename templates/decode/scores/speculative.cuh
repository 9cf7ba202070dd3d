  // P of a step's scores. Everybody counts on the reference of the steps before; if it has been outgrown, they do it again.
  __device__ __forceinline__ void softmax(const Unit& unit, int key, Scores& s) {
    Statistics added = {};
    bool again = true;
    if (has_references(unit, key)) {
      exponentiate(s, added);
      cutlass::arch::fence_view_async_shared();
      again = meet_and_vote(outgrown(s));
    }
    if (again) {
      settle(s);
#pragma unroll
      for (int j = 0; j < kRows / 4; ++j) {
        added[j] = 0.0f;
      }
      exponentiate(s, added);
      cutlass::arch::fence_view_async_shared();
      meet();
    }
#pragma unroll
    for (int j = 0; j < kRows / 4; ++j) {
      sum[j] += added[j];
    }
  }
