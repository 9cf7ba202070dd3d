  // Copies 64 rows of some columns of a tile to global memory; of keys that are not seen the gradient too.
  __device__ __forceinline__ void copy_rows(const CUtensorMap& map, const Element* from, int column, const Tile& tile) {
    const Sequence& sequence = shared.sequence;
    cute::SM90_TMA_STORE_5D::copy(&map, from, column, kRagged - sequence.held_k + tile.first_key + first_row(), tile.kv_head, kRagged,
                                  sequence.end_k - sequence.seqlen_k + sequence.held_k);
  }

