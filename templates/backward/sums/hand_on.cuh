  // Hands numbers of a part of dQ to the thread that adds them up, once there is room; the first finds it.
  template <int count>
  __device__ __forceinline__ void hand_on(float4* to, const float* numbers, int part, uint32_t phase, int adder) {
    shared.dq_empty[part].wait(phase);
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      to[i / 4 * kWarpgroup] = {numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]};
    }
    cutlass::arch::fence_view_async_shared();
    arrive(shared.dq_full[adder][part]);
  }

