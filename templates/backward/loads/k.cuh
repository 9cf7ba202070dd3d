  __device__ __forceinline__ void load_k(const Tile& tile) {
    shared.k_full.arrive_and_expect_tx(sizeof(shared.k));
    copy_keys<kHeadDimPadded, kQkSlab>(params.k, shared.k_full, shared.k, tile);
  }
