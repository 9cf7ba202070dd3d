  // Who adds the dQ of a step up: steps are even and odd as the stages of dS are.
  __device__ __forceinline__ int adder() const { return ds().stage; }

