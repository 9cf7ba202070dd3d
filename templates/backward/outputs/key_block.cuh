// What a share of a group's query heads gives to dV and dK of a tile, where several thread blocks have one each.
struct alignas(kLine) KeyBlock {
  float dv[kBlockN * kHeadDimVPadded];  // in the order of the threads' accumulators
  float dk[kBlockN * kHeadDimPadded];
};
