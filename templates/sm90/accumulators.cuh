// A warp has 16 of an accumulator's 64 rows, from warp_row() on.
__device__ __forceinline__ int warp_row() { return threadIdx.x % kWarpgroup / 32 * 16; }

// A thread has two of them, thread_row() and eight below: element i is in row i / 2 % 2 and in column
// i / 4 * 8 + i % 2, counted from 2 * (lane % 4). Four lanes share a row.
__device__ __forceinline__ int thread_row() { return warp_row() + lane() / 4; }
