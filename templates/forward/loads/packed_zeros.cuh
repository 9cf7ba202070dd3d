  // Rows of a warpgroup that hold no head of a whole query, which nobody ever loads: scores of zeros disturb no other row.
  if (params.pack.value * params.queries < kWarpgroupRows) {
    for (int i = threadIdx.x; i < kQStages * kBlockM * kHeadDimPadded; i += kThreads) {
      shared.q[0][i] = Element(0.f);
    }
    cutlass::arch::fence_view_async_shared();
  }
