// A block of rows of all, in the order of their records: the first early_blocks are those of whole sections.
__device__ __forceinline__ BlockOfRows block_of_rows(const Params& params, int index) {
  const int flat_head = params.m_blocks_divisor.divide(index), batch = params.heads_divisor.divide(flat_head);
  return {batch, flat_head - batch * params.heads, index - flat_head * params.m_blocks};
}

// The section of a KV head of all; the record of that number has its counter.
__device__ __forceinline__ int section_of(const Params& params, int flat_kv_head) {
  return min(params.section_heads.divide(flat_kv_head), params.sections - 1);
}
