// Blocks of rows of all sequences have numbers without anyone counting them: sequence i, which begins at offsets[i - 1], does so at
// slot offsets[i - 1] / kBlockM + i, which leaves room for the blocks of those before it, and now and then for one more. The rows
// before all sequences are number 0, those behind them the last.
struct Slots {
  const int32_t* offsets;
  int count;

  __device__ __forceinline__ int first_of(int sequence) const { return sequence > 0 ? first_behind(sequence) : 0; }

  // The same of any but number 0.
  __device__ __forceinline__ int first_behind(int sequence) const { return max(0, __ldg(offsets + sequence - 1)) / kBlockM + sequence; }

  // Which sequence a slot is of. All lanes of a warp look for the same, at 32 sequences at a time.
  __device__ __forceinline__ int owner(int slot) const {
    int low = 0, high = count + 1;
    while (high - low > 1) {
      const int step = ceil_div(high - low, 33), at = low + (lane() + 1) * step;
      const uint32_t begun = __ballot_sync(0xffffffff, at < high && first_behind(min(at, count)) <= slot);
      const int passed = __ffs(~begun) - 1;  // 32 where all have
      low += (begun == 0xffffffff ? 32 : passed) * step;
      high = min(high, low + step);
    }
    return low;
  }
};

// Where a sequence lies. Whatever the lengths say, that is within the tensors. Rows of no sequence see no key, and no row sees
// keys of none.
__device__ __forceinline__ Sequence sequence_of(const Params& params, int index) {
  const bool begins = index > 0, ends = index < params.offsets;
  Sequence sequence;
  sequence.end_q = ends ? min(max(0, __ldg(params.cu_seqlens_q + index)), params.total_q) : params.total_q;
  sequence.seqlen_q = max(0, sequence.end_q - (begins ? max(0, __ldg(params.cu_seqlens_q + index - 1)) : 0));
  const int first_key = begins ? max(0, __ldg(params.cu_seqlens_k + index - 1)) : 0;
  const int last_key = ends ? min(max(0, __ldg(params.cu_seqlens_k + index)), params.total_k) : params.total_k;
  sequence.held_k = max(0, last_key - first_key);
  sequence.seqlen_k = begins && ends ? sequence.held_k : 0;
  if (params.seqused_k && begins && ends) {
    sequence.seqlen_k = min(sequence.held_k, max(0, __ldg(params.seqused_k + index - 1)));
  }
  sequence.end_k = first_key + sequence.seqlen_k;
  sequence.first_slot = Slots{params.cu_seqlens_q, params.offsets}.first_of(index);
  return sequence;
}
