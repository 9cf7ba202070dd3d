// ---- Storing dK and dV -----------------------------------------------------------------------

// One gradient of a tile, once all consumers have rounded their rows; returns when its space is free. Where a group is shared out they
// have kept its parts themselves.
template <int columns, int slab>
__device__ __forceinline__ void store_gradient(const Params& params, const CUtensorMap& map, Barrier& full, uint32_t phase, const Element* space, const Tile& tile) {
  full.wait(phase);
#pragma unroll 1  // few registers
  for (int column = 0; column < columns && tile.first_key >= params.kept_keys; column += slab) {
    cute::SM90_TMA_STORE_4D::copy(&map, space + column * kBlockN, column, tile.first_key, tile.kv_head, tile.batch);
  }
  cute::tma_store_arrive();
  cute::tma_store_wait<0>();  // the space is free
}

// Both, while consumers are at the next tile: dV out of dS's space, and dK out of dQ's, as if it were the dQ of one step more.
__device__ __forceinline__ void store_gradients(const Params& params, SharedStorage& shared, const Tile& tile, uint32_t phase) {
  store_gradient<kHeadDimVPadded, kVSlab>(params, params.dv, shared.dv_full, phase, shared.ds[0], tile);
  shared.dv_empty.arrive();
  store_gradient<kHeadDimPadded, kQkSlab>(params, params.dk, shared.dk_full, phase, reinterpret_cast<const Element*>(shared.dq), tile);
#pragma unroll
  for (Barrier& empty : shared.dq_empty) {
    empty.arrive();
  }
}
