// Which column of an accumulator this one of a thread's columns is.
__device__ __forceinline__ int column_at(int j) { return j / 2 * 8 + lane() % 4 * 2 + j % 2; }

// Which row of all accumulators, tile after tile, the i-th number is in that a thread has of each of its columns.
__device__ __forceinline__ int row_at(int i) { return i / 2 * kTileM + thread_row() + i % 2 * 8; }

// And which element of the accumulator i / 2 that number is.
__device__ constexpr int element_at(int i, int j) { return j / 2 * 4 + i % 2 * 2 + j % 2; }

// Stores two 8x8 matrices of 16-bit elements, 16 rows of an accumulator by 8 columns, transposed at `address`, which
// each lane gives for column lane % 8 and the rows from lane / 8 % 2 * 8 on.
__device__ __forceinline__ void store_transposed(void* address, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], { %1, %2 };" ::"r"(
                   cute::cast_smem_ptr_to_uint(address)),
               "r"(a), "r"(b)
               : "memory");
}

// Hardware barriers, by number; 0 is __syncthreads.
enum NamedBarrier { kConsumer = 1 };

__device__ __forceinline__ void meet() {
  asm volatile("bar.sync %0, %1;" ::"r"(int(kConsumer)), "r"(kWarpgroup) : "memory");
}

// Whether any thread of the warpgroup says so, once all have come.
__device__ __forceinline__ bool meet_and_vote(bool vote) {
  int any;
  asm volatile(
      "{ .reg .pred said, any; setp.ne.s32 said, %3, 0; bar.red.or.pred any, %1, %2, said; selp.s32 %0, 1, 0, any; }"
      : "=r"(any)
      : "r"(int(kConsumer)), "r"(kWarpgroup), "r"(int(vote))
      : "memory");
  return any;
}
