  // P as the register operand of the PV GEMM, whose layout is the accumulator's.
  using Probabilities = uint32_t[kBlockN * sizeof(Element) / 8];

  __device__ __forceinline__ void pack_p(Probabilities& p, const float (&s)[kBlockN / 2]) {
#pragma unroll
    for (int i = 0; i < kBlockN / 4; ++i) {
      p[i] = pack(s[2 * i], s[2 * i + 1]);
    }
  }
