  float product_scale;  // of a thread's rows of S, before it becomes scores

  __device__ __forceinline__ static float scale_at(const ScaleTensor& scale, int batch, int head) {
    return scale.data ? __ldg(scale.at(batch, head)) : 1.f;
  }

  // The softmax of a tile before its first score. As many heads share it as divide eight, so that the two rows of a
  // thread are of the same one.
  __device__ __forceinline__ Softmax softmax_of(const Tile& tile) {
    prefetch_columns(tile);
    product_scale = params.product_scale * scale_at(params.q_scale, tile.batch, head_of(tile, thread_row())) *
                    scale_at(params.k_scale, tile.batch, tile.kv_head);
    return {params.scale_log2};
  }
