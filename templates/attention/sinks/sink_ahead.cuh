  // One more logit of each row of a head, without a value: nothing writes it while this kernel runs, so it may be read long
  // before it is needed.
  __device__ __forceinline__ float sink(int head) const { return float(__ldg(sinks + head)); }
