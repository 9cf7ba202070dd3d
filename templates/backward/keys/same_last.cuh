// The first row whose keys end after a key; seqlen_q if there is none.
__device__ __forceinline__ int first_row_past(const Lengths& lengths, int key) {
  return key < lengths.seqlen_k ? 0 : lengths.seqlen_q;
}
