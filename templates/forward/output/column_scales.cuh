  // Multiplies O by V's descales.
  __device__ __forceinline__ void scale_columns(const Tile& tile, Output& o) const {
    ColumnReader scale = {params.v_scale.of(tile.batch, tile.kv_head) + lane() % 4 * 2 * params.v_scale.stride_column,
                          params.v_scale.stride_column};
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; i += 4) {
      const float2 pair = scale.next();
      o[i] *= pair.x;
      o[i + 1] *= pair.y;
      o[i + 2] *= pair.x;
      o[i + 3] *= pair.y;
      if (i % 32 == 28 && scale.ends()) {
        return;
      }
    }
  }
