// ---- Rows, before and after ------------------------------------------------------------------

// A block of rows of a head.
struct BlockOfRows {
  int batch, head, m_block;

  __device__ __forceinline__ RowBlock& record(const Params& params) const { return params.row_block(batch, head, m_block); }

  __device__ __forceinline__ const Params& lengths(const Params& params) const { return params; }

  template <class T>
  __device__ __forceinline__ T* row(const Rows<T>& rows, int query) const {
    return rows.at(batch, query, head);
  }

  __device__ __forceinline__ float number(const Numbers& numbers, int query) const { return numbers.of(batch, head)[query]; }
};

// The one that a thread block before or after has.
__device__ __forceinline__ BlockOfRows own_block_of_rows(const Params& params) {
  const int m_block = blockIdx.x, head = params.first_head + blockIdx.y, batch = params.first_batch + blockIdx.z;
  return {batch, head, m_block};
}
