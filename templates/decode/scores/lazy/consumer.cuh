  // None yet.
  __device__ __forceinline__ float first_reference(const Unit&, int) const { return -INFINITY; }
