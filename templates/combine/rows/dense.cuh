// ---- Rows in memory --------------------------------------------------------------------------

// Heads are neighbours in memory, so they are neighbours here.
struct Row {
  int batch, seq, head;
};

__device__ __forceinline__ Row row_at(const Params& params, int number) {
  const int position = params.heads.divide(number);
  const int batch = params.seqlen.divide(position);
  return {batch, position - batch * params.seqlen.value, number - position * params.heads.value};
}

__device__ __forceinline__ const Element* outs_of(const Params& params, const Row& row, int column) {
  return params.outs + row.batch * params.outs_stride_batch + row.seq * params.outs_stride_seq +
         row.head * params.outs_stride_head + column;
}

__device__ __forceinline__ const float* lses_of(const Params& params, const Row& row) {
  return params.lses + row.batch * params.lses_stride_batch + row.head * params.lses_stride_head + row.seq;
}

__device__ __forceinline__ Output* out_of(const Params& params, const Row& row, int column) {
  return params.out + row.batch * params.out_stride_batch + row.seq * params.out_stride_seq +
         row.head * params.out_stride_head + column;
}

__device__ __forceinline__ float* lse_of(const Params& params, const Row& row) {
  return params.lse + row.batch * params.lse_stride_batch + row.head * params.lse_stride_head + row.seq;
}

// How many splits a row has, if it is there, and at most of the rows of a warp.
__device__ __forceinline__ void count_splits(const Params& params, const Row&, bool there, int& splits, int& most) {
  splits = there ? params.splits : 0;
  most = params.splits;
}
