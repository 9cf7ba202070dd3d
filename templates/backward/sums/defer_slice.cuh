  float rest[kDqColumns / 2 / kDqSlices];  // the last slice of the dQ of the step before
  bool has_rest = false;

  // One slice after another, but for the last.
  template <int count>
  __device__ __forceinline__ void pass_dq_on(const float (&dq)[count], int part) {
    float4* to = reinterpret_cast<float4*>(shared.dq) + part * kWarpgroup * kDqColumns / 8 / kDqSlices + threadIdx.x % kWarpgroup;
#pragma unroll
    for (int slice = 0; slice < kDqSlices - 1; ++slice) {
      hand_on<count / kDqSlices>(to, dq + slice * (count / kDqSlices), part, slice % 2 ^ 1, adder());
    }
#pragma unroll
    for (int i = 0; i < count / kDqSlices; ++i) {
      // by an instruction: else ptxas takes it for a register of the products, and waits for these
      asm volatile("mov.b32 %0, %1;" : "=f"(rest[i]) : "f"(dq[count - count / kDqSlices + i]));
    }
    has_rest = true;
  }

  // Hands on what pass_dq_on left of the dQ of the step before: by now the slice before it has been read.
  template <int count>
  __device__ __forceinline__ void pass_rest_on(int part) {
    if (has_rest) {
      float4* to = reinterpret_cast<float4*>(shared.dq) + part * kWarpgroup * kDqColumns / 8 / kDqSlices + threadIdx.x % kWarpgroup;
      hand_on<count / kDqSlices>(to, rest, part, (kDqSlices - 1) % 2 ^ 1, adder() ^ 1);
    }
  }

