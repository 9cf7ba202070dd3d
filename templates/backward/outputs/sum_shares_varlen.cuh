// Adds up what tiles of the same keys found of 64 rows of dK or dV, always in the order of their heads, and rounds that.
template <int columns, int padded>
__device__ __forceinline__ void sum_rows(const float* first, int64_t stride, int shares, const Rows<Element>& to, int first_row, int rows, int head, float scale) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kWarpgroupRows * padded / 4; i += kRowThreads) {
    float4 parts[4] = {};
#pragma unroll
    for (int share = 0; share < 4; ++share) {
      if (share < shares) {
        parts[share] = reinterpret_cast<const float4*>(first + share * stride)[i];
      }
    }
    float4 sum = {};
#pragma unroll
    for (const float4& x : parts) {
      sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    }
    // four neighbours of a thread's accumulator: two columns of a row, and of that eight below
    const int thread = i % kWarpgroup, row = thread / 32 * 16 + thread % 32 / 4, column = i / kWarpgroup * 8 + thread % 4 * 2;
    if (row < rows && column < columns) {
      *reinterpret_cast<uint32_t*>(to.at(first_row + row, head) + column) = pack(sum.x * scale, sum.y * scale);
    }
    if (row + 8 < rows && column < columns) {
      *reinterpret_cast<uint32_t*>(to.at(first_row + row + 8, head) + column) = pack(sum.z * scale, sum.w * scale);
    }
  }
}

// Of a tile that is the first of several with the same keys; thread blocks of all heads of a group take dK or dV of 64 keys each, in
// turns.
__device__ __forceinline__ void sum_tile(const Params& params, const ListedTile& listed, int head) {
  const Sequence& sequence = listed.sequence;
  const int kv_head = head / params.group, shares = ceil_div(params.group, int(listed.heads));
  const KeyBlock* const blocks = params.key_blocks + (int64_t(sequence.kept) * params.kv_heads + kv_head) * kCluster;
  const int64_t stride = int64_t(sizeof(KeyBlock) / sizeof(float)) * kCluster * params.kv_heads;
  const int keys = min(kCluster * kBlockN, sequence.held_k - listed.first_key), first_row = sequence.end_k - sequence.seqlen_k + listed.first_key;
  for (int unit = head % params.group; unit / 2 * kWarpgroupRows < keys; unit += params.group) {
    const int key = unit / 2 * kWarpgroupRows, row = key % kBlockN;
    const KeyBlock& own = blocks[key / kBlockN];
    if (unit % 2) {
      sum_rows<kHeadDimV, kHeadDimVPadded>(own.dv + row * kHeadDimVPadded, stride, shares, params.dv_rows, first_row + key, keys - key, kv_head, 1.f);
    } else {
      sum_rows<kHeadDim, kHeadDimPadded>(own.dk + row * kHeadDimPadded, stride, shares, params.dk_rows, first_row + key, keys - key, kv_head, params.scale);
    }
  }
}

// Of every so many listed tiles; each warp looks at 32 at a time, and all at the same.
__device__ __forceinline__ void sum_shares(const Params& params, int first, int every, int head) {
  const int tiles = params.list->tiles;
  for (; first < tiles; first += 32 * every) {
    const int place = first + lane() * every;
    const bool is_first = place < tiles && params.listed[place].sequence.kept >= 0 && params.listed[place].first_head == 0;
    for (uint32_t left = __ballot_sync(0xffffffff, is_first); left; left &= left - 1) {
      sum_tile(params, params.listed[first + (__ffs(left) - 1) * every], head);
    }
  }
}
