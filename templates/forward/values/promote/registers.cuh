  __device__ __forceinline__ void promote(Output& o, Softmax& softmax) {
#pragma unroll
    for (int i = 0; i < kOutputColumns / 2; ++i) {
      softmax.total[i] = softmax.total[i] * softmax.missed[row_of(i)] + o[i];
      o[i] = 0.f;
    }
    softmax.blocks = 0;
  }

  // O with the total, rescaled.
  __device__ __forceinline__ void collect(Output& o, const Softmax& softmax) {
#pragma unroll
    for (int i = 0; i < kOutputColumns / 2; ++i) {
      o[i] = softmax.total[i] * softmax.missed[row_of(i)] + o[i];
    }
  }
