  // The descriptor of V, which lies by rows, and of a slab of ones beside it that every step along K shares: from it to
  // that of the n-th row, as the address of V grows, the leading byte offset from there to the ones shrinks.
  __device__ __forceinline__ Descriptor v_begin() const {
    return descriptor<kVSlab>(shared.v[v.stage], kVDescriptor, (shared.ones - shared.v[v.stage]) * sizeof(Element));
  }
  __device__ __forceinline__ static uint32_t v_offset(int n) {
    const uint32_t units = n * kVSlab * sizeof(Element) >> 4;
    return units - (units << 16);
  }
