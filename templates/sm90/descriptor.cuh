// A matrix descriptor: an operand's address and the offsets between its core matrices. Addresses in units
// of 16 bytes never carry out of their 14 bits, so that only the low word changes.
struct Descriptor {
  uint32_t low, high;

  __device__ __forceinline__ Descriptor operator+(uint32_t offset) const { return {low + offset, high}; }
  __device__ __forceinline__ uint64_t bits() const { return uint64_t(high) << 32 | low; }
};
