  // P in shared memory, as a thread of either warpgroup has it.
  __device__ __forceinline__ uint4* shared_p() { return reinterpret_cast<uint4*>(shared.p[ds().stage]) + threadIdx.x % kWarpgroup; }

  // Hands P to the other warpgroup.
  __device__ __forceinline__ void pass_p_on(const Packed& p) {
    shared.p_empty[ds().stage].wait(ds().phase ^ 1);
    uint4* const to = shared_p();
#pragma unroll
    for (int i = 0; i < kBlockM / 4; i += 4) {
      to[i / 4 * kWarpgroup] = {p[i], p[i + 1], p[i + 2], p[i + 3]};
    }
    arrive(shared.p_full[ds().stage]);
  }

  // Takes P from the other warpgroup.
  __device__ __forceinline__ void take_p(Packed& p) {
    shared.p_full[ds().stage].wait(ds().phase);
    const uint4* const from = shared_p();
#pragma unroll
    for (int i = 0; i < kBlockM / 4; i += 4) {
      const uint4 four = from[i / 4 * kWarpgroup];
      p[i] = four.x, p[i + 1] = four.y, p[i + 2] = four.z, p[i + 3] = four.w;
    }
    fence_operand(p);  // it has been read
  }

