// How many numbers of dQ a warpgroup has.
__device__ constexpr int dq_part(int) { return kWarpgroupRows * kDqColumns; }
