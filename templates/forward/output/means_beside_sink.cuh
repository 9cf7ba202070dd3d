  // Adds what was taken off V's columns, whose weights in a row add up to one less that of the sink.
  __device__ __forceinline__ void add_means(const Tile& tile, Output& o) const {
    ColumnReader mean = {params.v_mean.of(tile.batch, tile.kv_head) + lane() % 4 * 2 * params.v_mean.stride_column, params.v_mean.stride_column};
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; i += 4) {
      const float2 pair = mean.next();
      o[i] = fmaf(pair.x, of_keys[0], o[i]);
      o[i + 1] = fmaf(pair.y, of_keys[0], o[i + 1]);
      o[i + 2] = fmaf(pair.x, of_keys[1], o[i + 2]);
      o[i + 3] = fmaf(pair.y, of_keys[1], o[i + 3]);
      if (i % 32 == 28 && mean.ends()) {
        return;
      }
    }
  }
