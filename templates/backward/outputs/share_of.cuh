  __device__ __forceinline__ KeyBlock& share_of(const Tile& tile) const {
    return params.key_blocks_of(tile.batch, tile.kv_head, tile.first_key / kBlockN)[tile.share];
  }

