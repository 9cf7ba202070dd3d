  uint32_t dq_phase = 1;  // the first step finds its buffer empty

  __device__ __forceinline__ void count_step() { dq_phase ^= 1; }

  // Who adds the dQ of a step up.
  __device__ __forceinline__ int adder() const { return dq_phase ^ 1; }

