  // One more logit of each row of a head, without a value.
  __device__ __forceinline__ float sink(int head) const { return float(sinks[head]); }
