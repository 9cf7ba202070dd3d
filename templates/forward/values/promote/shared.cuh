  // This thread's fp32 totals of O.
  __device__ __forceinline__ float4* totals() { return &shared.totals[warpgroup][0][threadIdx.x % kWarpgroup]; }

  // The total, rescaled, with O added.
  __device__ __forceinline__ static float4 total_of(const Output& o, const Softmax& softmax, int i, const float4* totals) {
    const float4 kept = softmax.begun ? totals[i / 4 * kWarpgroup] : float4{};
    const float (&missed)[2] = softmax.missed;
    return {fmaf(kept.x, missed[0], o[i]), fmaf(kept.y, missed[0], o[i + 1]), fmaf(kept.z, missed[1], o[i + 2]),
            fmaf(kept.w, missed[1], o[i + 3])};
  }

  __device__ __forceinline__ void promote(Output& o, Softmax& softmax) {
    float4* const to = totals();
#pragma unroll
    for (int i = 0; i < kOutputColumns / 2; i += 4) {
      to[i / 4 * kWarpgroup] = total_of(o, softmax, i, to);
      o[i] = o[i + 1] = o[i + 2] = o[i + 3] = 0.f;
    }
    softmax.begun = true;
    softmax.blocks = 0;
  }

  // O with the total, rescaled.
  __device__ __forceinline__ void collect(Output& o, const Softmax& softmax) {
    if (!softmax.begun) {
      return;
    }
    const float4* const from = totals();
#pragma unroll
    for (int i = 0; i < kOutputColumns / 2; i += 4) {
      const float4 total = total_of(o, softmax, i, from);
      o[i] = total.x;
      o[i + 1] = total.y;
      o[i + 2] = total.z;
      o[i + 3] = total.w;
    }
  }
