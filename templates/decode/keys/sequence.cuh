// ---- Units of work ---------------------------------------------------------------------------

// A sequence's keys: `length` rows of the cache from `first` on.
struct Sequence {
  int first, length;
};

// Lengths are the caller's: whatever they are, nothing outside of the cache is meant. They are not read through L1, which
// might have them from before the launch before this one ended.
__device__ __forceinline__ Sequence sequence_of(const Params& params, int batch) {
  const int end = params.seqused_k ? min(max(0, __ldcg(params.seqused_k + batch)), params.seqlen_k) : params.seqlen_k;
  const int first = params.leftpad_k ? max(0, __ldcg(params.leftpad_k + batch)) : 0;
  return {first, max(0, end - first)};  // neither is negative: the difference is an int
}
