  // Where LSE of a tile's head begins: the first row of its batch.
  __device__ __forceinline__ int64_t lse_begin(const Tile& tile) const {
    return tile.batch * params.lse_stride_batch + tile.head * params.lse_stride_head;
  }

  // Copies columns of the warpgroup's rows of O, from `column` on, a slab from shared memory.
  __device__ __forceinline__ void copy_out(const Tile& tile, const OutElement* slab, int column) {
    cute::SM90_TMA_STORE_4D::copy(&params.out, slab, column, first_row(tile), tile.head, tile.batch);
  }
