  // Adds the parts of a tile's keys up, for the warpgroup that ends last: it goes on with the whole, the others without
  // (false). They are added in their order, whoever that is, so that a call is the same bits each time.
  __device__ __forceinline__ bool add_parts(const Tile& tile, Output& o, Softmax& softmax) {
    constexpr int kPieces = kHeadDimVPadded / 8, kPart = kConsumers * (kPieces + 1) * kWarpgroup;  // of float4s
    const int count = params.parts.value, number = params.parts.divide(tile.unit);
    float4* const first = params.partials + warpgroup * (kPieces + 1) * kWarpgroup + threadIdx.x % kWarpgroup;

    // relative to the row maxima themselves, as splits of the keys are
    const float factor[2] = {softmax.unrounded(0), softmax.unrounded(1)};
    float4* const own = first + int64_t(tile.unit) * kPart;
    __stcg(own + kPieces * kWarpgroup, make_float4(softmax.max[0], softmax.max[1], softmax.sum[0] * factor[0], softmax.sum[1] * factor[1]));
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      __stcg(own + i * kWarpgroup, make_float4(o[i * 4] * factor[0], o[i * 4 + 1] * factor[0], o[i * 4 + 2] * factor[1], o[i * 4 + 3] * factor[1]));
    }
    __threadfence();
    barrier_sync(kStore + warpgroup, kWarpgroup);
    if (threadIdx.x % kWarpgroup == 0) {
      shared.parts_before[warpgroup] = atomicAdd(params.parts_ended + number * kConsumers + warpgroup, 1u);
    }
    barrier_sync(kStore + warpgroup, kWarpgroup);
    if (shared.parts_before[warpgroup] + 1 < count) {
      return false;
    }
    __threadfence();

    const float4* const parts = first + int64_t(number) * count * kPart;
    float top[2] = {kNoScore, kNoScore};
    for (int part = 0; part < count; ++part) {
      const float4 rows = __ldcg(parts + part * kPart + kPieces * kWarpgroup);
      top[0] = fmaxf(top[0], rows.x);
      top[1] = fmaxf(top[1], rows.y);
    }
#pragma unroll
    for (int i = 0; i < kHeadDimVPadded / 2; ++i) {
      o[i] = 0.f;
    }
    softmax.sum[0] = softmax.sum[1] = 0.f;
    softmax.max[0] = top[0];
    softmax.max[1] = top[1];
#pragma unroll 1
    for (int part = 0; part < count; ++part) {
      const float4* const of_part = parts + part * kPart;
      const float4 rows = __ldcg(of_part + kPieces * kWarpgroup);
      const float weight[2] = {exp2_approx(__fmaf_rn(rows.x - top[0], softmax.scale, kPOffset)),
                               exp2_approx(__fmaf_rn(rows.y - top[1], softmax.scale, kPOffset))};
      softmax.sum[0] += rows.z * weight[0];
      softmax.sum[1] += rows.w * weight[1];
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const float4 x = __ldcg(of_part + i * kWarpgroup);
        o[i * 4] = fmaf(x.x, weight[0], o[i * 4]);
        o[i * 4 + 1] = fmaf(x.y, weight[0], o[i * 4 + 1]);
        o[i * 4 + 2] = fmaf(x.z, weight[1], o[i * 4 + 2]);
        o[i * 4 + 3] = fmaf(x.w, weight[1], o[i * 4 + 3]);
      }
    }
    return true;
  }
