  // Adds what was taken off V's columns, whose weights in a row add up to one.
  __device__ __forceinline__ void add_means(const Tile& tile, Output& o) const {
    ColumnReader mean = {params.v_mean.of(tile.batch, tile.kv_head) + lane() % 4 * 2 * params.v_mean.stride_column, params.v_mean.stride_column};
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; i += 4) {
      const float2 pair = mean.next();
      o[i] += pair.x;
      o[i + 1] += pair.y;
      o[i + 2] += pair.x;
      o[i + 3] += pair.y;
      if (i % 32 == 28 && mean.ends()) {
        return;
      }
    }
  }
