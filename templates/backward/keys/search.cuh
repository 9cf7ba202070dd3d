// The first row whose keys are as a predicate says, as are those of all rows after it; seqlen_q if there is none.
template <class Predicate>
__device__ __forceinline__ int first_row_where(const Lengths& lengths, const Predicate& is_so) {
  int low = 0, high = lengths.seqlen_q;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (is_so(seen_by(lengths, middle))) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}
