constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t kMostStride = int64_t(1) << 38;  // TMA's end below 2^40 bytes

// A dimension of a tensor whose elements do not lie side by side.
struct Dim {
  int64_t size, stride;
};

// A tensor as the caller laid it out: elements that lie side by side, and its other dimensions. TMA, or accesses of 16 bytes, follow an aligned one. No two elements of one that is written may be one.
static inline Status check_tensor(const void* data, int element_bytes, bool aligned, bool written, int64_t most, int64_t row, std::initializer_list<Dim> dims) {
  bool empty = row == 0, strides_fit = true, overlaps = false;
  double reach = double(row);  // elements from the first one to the last
  for (const Dim& dim : dims) {
    empty |= dim.size == 0;
    if (dim.size > 1) {
      strides_fit &= dim.stride >= 0 && dim.stride <= most && (!aligned || dim.stride * element_bytes % kAlignment == 0);
      double within = double(row);  // the reach of what this dimension steps over
      for (const Dim& other : dims) {
        const bool shorter = other.stride < dim.stride || (other.stride == dim.stride && &other < &dim);
        within += other.size > 1 && shorter ? double(other.size - 1) * double(other.stride) : 0;
      }
      overlaps |= written && double(dim.stride) < within;
      reach += double(dim.size - 1) * double(dim.stride);
    }
  }
  if (!data || empty) {
    return empty ? kOk : kNullPointer;
  }
  if (reinterpret_cast<uintptr_t>(data) % (aligned ? kAlignment : element_bytes) != 0) {
    return kMisaligned;
  }
  return !strides_fit || reach * element_bytes >= 0x1p62 ? kBadStride : overlaps ? kOverlap : kOk;
}
