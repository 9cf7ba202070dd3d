  __device__ __forceinline__ KeyBlock& share_of(const Tile& tile) const {
    return params.key_blocks_of(tile.batch, tile.kv_head, tile.first_key / kBlockN)[tile.share];
  }

  // Leaves 64 rows of a gradient's share as they are.
  template <int all, int count>
  __device__ __forceinline__ void keep(float (&share)[all], const float (&gradient)[count]) {
    float4* to = reinterpret_cast<float4*>(share) + first_row() * count / 2 + threadIdx.x % kWarpgroup;
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      to[i / 4 * kWarpgroup] = {gradient[i], gradient[i + 1], gradient[i + 2], gradient[i + 3]};
    }
  }

