// The row, of a warp's 16, that is a lane's first (0) or second (1).
__device__ __forceinline__ int row_of(int which) { return lane_id() / 4 + 8 * which; }
