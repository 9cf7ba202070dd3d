  // dS = P (dP - delta), in place of dP - delta.
  __device__ __forceinline__ void differentiate(const Packed& p, Scores& dp) {
#pragma unroll
    for (int i = 0; i < kBlockM / 2; i += 2) {
      const float2 two = unpack(p[i / 2]);
      dp[i] *= two.x;
      dp[i + 1] *= two.y;
    }
  }

