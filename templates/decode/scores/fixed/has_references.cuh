  // Whether references are the caller's, or come from keys before this one.
  __device__ __forceinline__ bool has_references(const Unit& unit, int key) const {
    return !exact || key > unit.first_key;
  }
