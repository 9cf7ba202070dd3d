// ---- Rows, before and after ------------------------------------------------------------------

// A block of rows of a head, in the sequence that its slot is of.
struct BlockOfRows {
  int slot, head, m_block;
  Sequence sequence;
  int begin;  // of the sequence

  // A slot may have no block of rows.
  __device__ __forceinline__ bool exists() const { return m_block >= 0 && m_block * kBlockM < sequence.seqlen_q; }

  // Rows from its first one to the end of the sequence.
  __device__ __forceinline__ int left() const { return sequence.seqlen_q - m_block * kBlockM; }

  __device__ __forceinline__ RowBlock& record(const Params& params) const { return params.row_block(head, slot); }

  __device__ __forceinline__ const Sequence& lengths(const Params&) const { return sequence; }

  template <class T>
  __device__ __forceinline__ T* row(const Rows<T>& rows, int query) const {
    return rows.at(begin + query, head);
  }

  __device__ __forceinline__ float number(const Numbers& numbers, int query) const { return numbers.of(head)[begin + query]; }
};

// The one that a thread block before or after has; the first of those before, which lists tiles, has none.
__device__ __forceinline__ BlockOfRows own_block_of_rows(const Params& params) {
  const Slots slots = {params.cu_seqlens_q, params.offsets};
  const int slot = int(blockIdx.x) + params.m_slots - int(gridDim.x);
  const int head = params.first_head + blockIdx.y, index = slots.owner(slot), m_block = slot - slots.first_of(index);
  const Sequence sequence = sequence_of(params, index);
  return {slot, head, m_block, sequence, sequence.end_q - sequence.seqlen_q};
}
