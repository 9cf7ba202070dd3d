// Adds up what tiles of the same keys found of 64 rows of dK or dV, always in the order of their heads, and rounds that.
template <int columns, int padded>
__device__ __forceinline__ void sum_rows(const Params& params, const float* first, int shares, const Rows<Element>& to, int row, int rows, int head, float scale) {
  const int64_t share_stride = int64_t(sizeof(KeyBlock) / sizeof(float4)) * kCluster * params.kv_heads;
  __shared__ uint32_t rounded[kWarpgroupRows][padded / 2 + 4];
#pragma unroll 2  // few registers
  for (int i = threadIdx.x; i < kWarpgroupRows * padded / 4; i += kRowThreads) {
    // four neighbours of a thread's accumulator, as of dQ
    const int thread = i % kWarpgroup, own = thread / 32 * 16 + thread % 32 / 4, pair = i / kWarpgroup * 4 + thread % 4;
    float4 sum = {};
#pragma unroll 1
    for (int share = 0; share < shares; ++share) {
      const float4 x = reinterpret_cast<const float4*>(first)[share * share_stride + i];
      sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    }
    rounded[own][pair] = pack(sum.x * scale, sum.y * scale);
    rounded[own + 8][pair] = pack(sum.z * scale, sum.w * scale);
  }
  __syncthreads();
  constexpr int kLoads = columns * sizeof(Element) / 16;  // of a row
  for (int i = threadIdx.x; i < min(kWarpgroupRows, rows) * kLoads; i += kRowThreads) {
    reinterpret_cast<uint4*>(to.at(row + i / kLoads, head))[i % kLoads] = *reinterpret_cast<const uint4*>(&rounded[i / kLoads][i % kLoads * 4]);
  }
  __syncthreads();  // what is rounded next takes the same space
}

// Of a listed tile, if it is the first of several with the same keys; thread blocks of all heads of a group take 64 keys each, in turns.
__device__ __forceinline__ void sum_shares(const Params& params, int place, int head) {
  if (place >= params.list->tiles) {
    return;
  }
  const ListedTile listed = params.listed[place];
  const Sequence& sequence = listed.sequence;
  if (sequence.kept < 0 || listed.first_head > 0) {
    return;
  }
  const int kv_head = head / params.group, shares = ceil_div(params.group, int(listed.heads));
  const KeyBlock* const first = params.key_blocks + (int64_t(sequence.kept) * params.kv_heads + kv_head) * kCluster;
  const int keys = min(kCluster * kBlockN, sequence.held_k - listed.first_key), first_row = sequence.end_k - sequence.seqlen_k + listed.first_key;
  for (int key = head % params.group * kWarpgroupRows; key < keys; key += params.group * kWarpgroupRows) {
    const KeyBlock& own = first[key / kBlockN];
    const int row = key % kBlockN;
    sum_rows<kHeadDimV, kHeadDimVPadded>(params, own.dv + row * kHeadDimVPadded, shares, params.dv_rows, first_row + key, keys - key, kv_head, 1.f);
    sum_rows<kHeadDim, kHeadDimPadded>(params, own.dk + row * kHeadDimPadded, shares, params.dk_rows, first_row + key, keys - key, kv_head, params.scale);
  }
}
