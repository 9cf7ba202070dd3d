// Descales in global memory, by batch and head, one for each block of rows where scales are by block.
struct ScaleTensor {
  const float* data;
  int64_t stride_batch, stride_head;

  __device__ __forceinline__ const float* at(int batch, int head) const {
    return data + batch * stride_batch + head * stride_head;
  }
};

// Reads the numbers of a thread's columns of O, two neighbours of each eight.
struct ColumnReader {
  const float* at;
  int64_t stride;

  __device__ __forceinline__ float2 next() {
    const float2 pair = {__ldg(at), __ldg(at + stride)};
    at += 8 * stride;
    return pair;
  }

  // Never true, but the compiler cannot know: it would load all columns at once, for which there are no registers.
  __device__ __forceinline__ bool ends() {
    asm volatile("" : "+l"(at));
    return !at;
  }
};

// A number for each column of a head; strides are 0 where one serves for all.
struct ColumnTensor {
  const float* data;
  int64_t stride_batch, stride_head, stride_column;

  __device__ __forceinline__ const float* of(int batch, int head) const {
    return data + batch * stride_batch + head * stride_head;
  }

  __device__ __forceinline__ void prefetch(int batch, int head, int column) const {
    if (data) {
      asm volatile("prefetch.global.L1 [%0];" ::"l"(of(batch, head) + column * stride_column));
    }
  }
};
