// ---- Rows ------------------------------------------------------------------------------------

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }

// The first of a lane's columns of a chunk.
__device__ __forceinline__ int column_of(int chunk) { return 32 * chunk + 8 * (lane_id() % 4); }
