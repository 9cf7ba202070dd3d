  // Where LSE of one of the heads that share a tile begins: the first row of its batch.
  __device__ __forceinline__ int64_t lse_begin(const Tile& tile, int number) const {
    const int head = tile.head * params.pack.value + number;
    return tile.batch * params.lse_stride_batch + head * params.lse_stride_head;
  }

  // Copies columns of the warpgroup's rows of O, from `column` on, a slab from shared memory.
  __device__ __forceinline__ void copy_out(const Tile& tile, const OutElement* slab, int column) {
    cute::SM90_TMA_STORE_4D::copy(&params.out, slab, column, tile.head * params.pack.value, first_row(tile),
                                  tile.batch);
  }
