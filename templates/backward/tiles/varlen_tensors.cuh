enum : int { kRagged = 1 << 30 };  // rows of a tensor map, where every sequence ends

// Rows (total, heads, columns) in global memory.
template <class T>
struct Rows {
  T* data;
  int64_t stride_seq, stride_head;

  __device__ __forceinline__ T* at(int row, int head) const { return data + row * stride_seq + head * stride_head; }
};

// Numbers (heads, total) in global memory.
struct Numbers {
  const float* data;
  int64_t stride_head;

  __device__ __forceinline__ const float* of(int head) const { return data + head * stride_head; }
};

using Lengths = Sequence;
