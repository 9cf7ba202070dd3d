// Rows (batch, seqlen, heads, columns) in global memory.
template <class T>
struct Rows {
  T* data;
  int64_t stride_batch, stride_seq, stride_head;

  __device__ __forceinline__ T* at(int batch, int row, int head) const {
    return data + batch * stride_batch + row * stride_seq + head * stride_head;
  }
};

// Numbers (batch, heads, seqlen) in global memory.
struct Numbers {
  const float* data;
  int64_t stride_batch, stride_head;

  __device__ __forceinline__ const float* of(int batch, int head) const {
    return data + batch * stride_batch + head * stride_head;
  }
};
