// The row, of a warp's 16, that is a lane's first (0) or second (1): pairs of rows come in the order of P's keys.
__device__ __forceinline__ int row_of(int which) {
  const int group = lane_id() / 4;
  return group / 2 * 2 + group % 2 * 8 + which;
}
