  // Whether no byte is that of the largest number, to which larger ones are cut off, or of NaN: 2 more sets the sign
  // of these alone.
  __device__ __forceinline__ static bool in_range(const Probabilities& p) {
    uint32_t sum = 0;
#pragma unroll
    for (const uint32_t four : p) {
      sum |= four + 0x02020202;
    }
    return (sum & 0x80808080) == 0;
  }
