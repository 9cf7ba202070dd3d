  for (int i = threadIdx.x; i < kStepK * kVSlab; i += kThreads) {
    shared.ones[i] = Element(1.f);
  }
  cutlass::arch::fence_view_async_shared();
