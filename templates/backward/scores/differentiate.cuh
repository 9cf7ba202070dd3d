  // dS = P (dP - delta), in place of dP - delta.
  __device__ __forceinline__ void differentiate(const Scores& p, Scores& dp) {
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) {
      dp[i] *= p[i];
    }
  }

