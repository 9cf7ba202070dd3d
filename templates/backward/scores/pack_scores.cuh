  __device__ __forceinline__ void pack_scores(Packed& packed, const Scores& s) {
#pragma unroll
    for (int i = 0; i < kBlockM / 4; ++i) {
      packed[i] = pack(s[2 * i], s[2 * i + 1]);
    }
  }

