  // The descriptor of V, which lies by rows, and from it to that of its n-th row.
  __device__ __forceinline__ Descriptor v_begin() const {
    return descriptor<kVSlab>(shared.v[v.stage], kVDescriptor, kBlockN * kVSlab * sizeof(Element));
  }
  __device__ __forceinline__ static uint32_t v_offset(int n) { return n * kVSlab * sizeof(Element) >> 4; }
