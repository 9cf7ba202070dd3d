// All warpgroups have rows of each tile.
struct TileRing {
  __device__ __forceinline__ void pass_on(SharedStorage& shared, uint32_t stage) { shared.tile_full[stage].arrive(); }
};
