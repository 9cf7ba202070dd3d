  // Whether references come from keys before this one.
  __device__ __forceinline__ bool has_references(const Unit& unit, int key) const { return key > unit.first_key; }
