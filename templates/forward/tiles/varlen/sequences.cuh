// Where a sequence lies. Whatever the lengths say, that is within the tensors. The rows behind all sequences, and those before
// them, are two more, which see no key.
__device__ __forceinline__ Sequence sequence_of(const Params& params, int index) {
  Sequence sequence = {};
  if (index < params.batch) {
    sequence.end_q = min(max(0, __ldg(params.cu_seqlens_q + index + 1)), params.total_q);
    sequence.seqlen_q = max(0, sequence.end_q - max(0, __ldg(params.cu_seqlens_q + index)));
    const int first_key = max(0, __ldg(params.cu_seqlens_k + index));
    sequence.seqlen_k = max(0, min(max(0, __ldg(params.cu_seqlens_k + index + 1)), params.total_k) - first_key);
    if (params.seqused_k) {
      sequence.seqlen_k = min(sequence.seqlen_k, max(0, __ldg(params.seqused_k + index)));
    }
    sequence.end_k = first_key + sequence.seqlen_k;
  } else if (index < params.batch + kAround) {
    const bool behind = index == params.batch;
    const int offset = params.cu_seqlens_q ? max(0, __ldg(params.cu_seqlens_q + (behind ? params.batch : 0))) : 0;
    sequence.end_q = behind ? params.total_q : min(offset, params.total_q);
    sequence.seqlen_q = behind ? max(0, params.total_q - offset) : sequence.end_q;
  }
  return sequence;
}
