  // The descriptor of V from a column on, which lies transposed, and from it to that of its n-th key.
  __device__ __forceinline__ Descriptor v_begin(int column = 0) const {
    return descriptor<kVSlab>(shared.v[v.stage] + column * kVSlab, kVDescriptor);
  }
  __device__ __forceinline__ static uint32_t v_offset(int n) { return column_offset<kHeadDimVPadded, kVSlab>(n); }
