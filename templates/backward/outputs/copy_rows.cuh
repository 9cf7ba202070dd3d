  // Copies 64 rows of some columns of a tile to global memory.
  __device__ __forceinline__ void copy_rows(const CUtensorMap& map, const Element* from, int column, const Tile& tile) {
    cute::SM90_TMA_STORE_4D::copy(&map, from, column, tile.first_key + first_row(), tile.kv_head, tile.batch);
  }

