// A thread block's tile, and its sequence, of whose keys those that most rows see come first. Where its slot has no block of
// keys first_key is not below held_k.
__device__ __forceinline__ Tile tile_of(const Params& params, Sequence& sequence) {
  const Slots<kBlockN> slots = {params.cu_seqlens_k, params.offsets};
  Tile tile;
  tile.kv_head = blockIdx.x / params.n_slots;
  const int slot = blockIdx.x - tile.kv_head * params.n_slots, index = slots.owner(slot);
  sequence = sequence_of(params, index);
  const int first_slot = slots.first_of(index), m_blocks = ceil_div(sequence.seqlen_q, kBlockM);
  // where offsets fall another may have its first slot: then nobody else may wait for that block
  const bool whole = first_slot <= slot && slots.owner(first_slot) == index;
  tile.first_key = whole ? (slot - first_slot) * kBlockN : sequence.held_k;
  tile.first_head = tile.kv_head * params.group;
  tile.last_head = tile.first_head + params.group;
  find_blocks(tile, sequence, tile.first_key, m_blocks);
  return tile;
}

__device__ __forceinline__ const Lengths& lengths_of(const Params&, const SharedStorage& shared) { return shared.sequence; }

// Of a tile's rows of a head.
__device__ __forceinline__ RowBlock& row_block_of(const Params& params, const SharedStorage& shared, const Tile&, int head, int block) {
  return params.row_block(head, shared.sequence.first_slot + block);
}
