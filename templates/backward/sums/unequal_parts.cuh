// How many numbers of dQ a warpgroup has.
__device__ constexpr int dq_part(int part) { return kWarpgroupRows * (part + 1 < kDqParts ? kDqColumns : kDqRest); }
