  // What O's columns will be multiplied by, and their means, to the L1 cache before they are needed.
  __device__ __forceinline__ void prefetch_columns(const Tile& tile) const {
    for (int column = threadIdx.x % kWarpgroup; column < kHeadDimV; column += kWarpgroup) {
      params.v_scale.prefetch(tile.batch, tile.kv_head, column);
      params.v_mean.prefetch(tile.batch, tile.kv_head, column);
    }
  }
