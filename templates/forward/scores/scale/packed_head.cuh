  __device__ __forceinline__ static float scale_at(const ScaleTensor& scale, int batch, int head) {
    return scale.data ? __ldg(scale.at(batch, head)) : 1.f;
  }

  // The softmax of a tile before its first score. As many heads share it as divide eight, so that the two rows of a
  // thread are of the same one.
  __device__ __forceinline__ Softmax softmax_of(const Tile& tile) const {
    prefetch_columns(tile);
    return {params.scale_log2 * q_scale_of(tile, thread_row()) * scale_at(params.k_scale, tile.batch, tile.kv_head)};
  }

  // By a row of the warpgroup's.
  __device__ __forceinline__ float q_scale_of(const Tile& tile, int row) const {
    return scale_at(params.q_scale, tile.batch, head_of(tile, row));
  }
