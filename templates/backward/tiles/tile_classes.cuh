// ---- The order of tiles ----------------------------------------------------------------------

// Of how many steps a tile is, roughly: the longer, the lower.
__device__ __forceinline__ int class_of(int steps) {
  const int exponent = 31 - __clz(steps);
  return kRowThreads - 1 - (exponent < 3 ? steps : (exponent - 2) * 8 + (steps >> (exponent - 3)) % 8);
}

// The fewest steps of a tile of a class.
__device__ __forceinline__ int steps_of(int own_class) {
  const int rank = kRowThreads - 1 - own_class;
  return rank < 8 ? rank : (8 + rank % 8) << (rank / 8 - 1);
}

// In how many steps of a head there are rows that see keys from first_key on.
__device__ __forceinline__ int steps_from(const Sequence& sequence, int first_key) {
  const int first_row = first_row_past(sequence, first_key);
  return first_row < sequence.seqlen_q ? ceil_div(sequence.seqlen_q, kBlockM) - first_row / kBlockM : 0;
}
