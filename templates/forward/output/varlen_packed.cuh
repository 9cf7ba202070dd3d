  // Where LSE of one of the heads that share a tile begins: the first row of its sequence.
  __device__ __forceinline__ int64_t lse_begin(const Tile& tile, int number) const {
    const int head = tile.head * params.pack.value + number;
    return head * params.lse_stride_head + tile.sequence.end_q - tile.sequence.seqlen_q;
  }

  // Copies columns of the warpgroup's rows of O, from `column` on, a slab from shared memory.
  __device__ __forceinline__ void copy_out(const Tile& tile, const OutElement* slab, int column) {
    cute::SM90_TMA_STORE_5D::copy(&params.out, slab, column, tile.head * params.pack.value,
                                  kRagged - tile.sequence.seqlen_q + first_row(tile), kRagged, tile.sequence.end_q);
  }
