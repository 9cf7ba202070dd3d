  // P as the register operand of the PV GEMM. There a thread has four neighbouring columns of a row, where in the
  // accumulator it has two and, eight columns on, two more. These are taken as they are: V's keys lie in that order.
  using Probabilities = uint32_t[kBlockN * sizeof(Element) / 8];

  __device__ __forceinline__ void pack_p(Probabilities& p, const float (&s)[kBlockN / 2]) {
#pragma unroll
    for (int i = 0; i < kBlockN / 8; ++i) {
      const float* x = s + i / 2 * 8 + i % 2 * 2;
      p[i] = pack(x[0], x[1], x[4], x[5]);
    }
  }
