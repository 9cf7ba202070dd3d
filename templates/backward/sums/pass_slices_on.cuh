  // One slice after another.
  template <int count>
  __device__ __forceinline__ void pass_dq_on(const float (&dq)[count], int part) {
    float4* to = reinterpret_cast<float4*>(shared.dq) + part * kWarpgroup * kDqColumns / 8 / kDqSlices + threadIdx.x % kWarpgroup;
#pragma unroll
    for (int slice = 0; slice < kDqSlices; ++slice) {
      hand_on<count / kDqSlices>(to, dq + slice * (count / kDqSlices), part, slice % 2 ^ 1, adder());
    }
  }

