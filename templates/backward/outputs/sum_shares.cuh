// Adds up what shares of a group found of 64 rows of dK or dV, always in their order, and rounds that.
template <int columns, int padded>
__device__ __forceinline__ void sum_rows(const Params& params, const float* first, const Rows<Element>& to, int key, int head, int batch, float scale) {
  constexpr int kShare = sizeof(KeyBlock) / sizeof(float4);
  const int shares = key < params.cut_keys ? params.shares : params.shares_divisor.value;
  __shared__ uint32_t rounded[kWarpgroupRows][padded / 2 + 4];
  for (int i = threadIdx.x; i < kWarpgroupRows * padded / 4; i += kRowThreads) {
    // four neighbours of a thread's accumulator, as of dQ
    const int thread = i % kWarpgroup, row = thread / 32 * 16 + thread % 32 / 4, pair = i / kWarpgroup * 4 + thread % 4;
    float4 sum = {};
    for (int share = 0; share < shares; ++share) {
      const float4 x = reinterpret_cast<const float4*>(first)[int64_t(share) * kShare + i];
      sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    }
    rounded[row][pair] = pack(sum.x * scale, sum.y * scale);
    rounded[row + 8][pair] = pack(sum.z * scale, sum.w * scale);
  }
  __syncthreads();
  constexpr int kLoads = columns * sizeof(Element) / 16;  // of a row
  for (int i = threadIdx.x; i < kWarpgroupRows * kLoads; i += kRowThreads) {
    const int row = i / kLoads;
    if (key + row < params.seqlen_k) {
      reinterpret_cast<uint4*>(to.at(batch, key + row, head))[i % kLoads] = *reinterpret_cast<const uint4*>(&rounded[row][i % kLoads * 4]);
    }
  }
}

__global__ void __launch_bounds__(kRowThreads) sum_shares(const __grid_constant__ Params params) {
  const int key = blockIdx.x * kWarpgroupRows, head = params.first_head + blockIdx.y, batch = params.first_batch + blockIdx.z;
  const KeyBlock& first = *params.key_blocks_of(batch, head, key / kBlockN);
  const int row = key % kBlockN;
  sum_rows<kHeadDimV, kHeadDimVPadded>(params, first.dv + row * kHeadDimVPadded, params.dv_rows, key, head, batch, 1.f);
  __syncthreads();  // both round by way of the same shared memory
  sum_rows<kHeadDim, kHeadDimPadded>(params, first.dk + row * kHeadDimPadded, params.dk_rows, key, head, batch, params.scale);
}
