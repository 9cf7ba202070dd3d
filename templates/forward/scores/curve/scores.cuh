  bool by_curve;  // whether the tile's first maxima are well in the curve, in all rows of the warpgroup
  bool curved;    // and this warp's so far

  // Whether all rows of the warpgroup are so far in the curve that they are likely to stay: all must take the same steps.
  __device__ __forceinline__ bool all_in_curve(const Softmax& softmax) {
    uint8_t(&rows)[4] = shared.curved[warpgroup];
    const bool well = fmaxf(softmax.max[0], softmax.max[1]) <= params.curve_first;
    const bool all = __all_sync(0xffffffff, softmax.in_curve(params) && well);
    if (lane() == 0) {
      rows[threadIdx.x % kWarpgroup / 32] = all;
    }
    barrier_sync(kStore + warpgroup, kWarpgroup);
    return rows[0] + rows[1] + rows[2] + rows[3] == 4;
  }

  // P of a block by the curve, its products as they are, relative to the maximum so far. Returns whether it fits: else
  // products may be beyond the curve.
  __device__ __forceinline__ bool curved_scores(const float (&s)[kBlockN / 2], Probabilities& p, Softmax& softmax) {
    const float offset[2] = {-softmax.reference(0), -softmax.reference(1)};
    Chains chains;
#pragma unroll
    for (int begin = 0; begin < kBlockN / 2; begin += kCurvedGroup) {
      float group[kCurvedGroup];
      exponentiate_curved<kCurvedGroup>(s + begin, group, params.curve, offset, chains, begin == 0);
#pragma unroll
      for (int i = 0; i < kCurvedGroup / 2; ++i) {
        p[begin / 2 + i] = pack(group[2 * i], group[2 * i + 1]);
      }
      __syncwarp();  // lest ptxas has all groups under way at a time, in too many registers
    }
    const float part[2] = {sum_of(chains, 0), sum_of(chains, 1)};
    if (!__all_sync(0xffffffff, part[0] <= kMaxCurvedSum && part[1] <= kMaxCurvedSum)) {
      return false;
    }
    softmax.sum[0] += part[0];
    softmax.sum[1] += part[1];
    softmax.raised = false;
    return true;
  }
