// How many keys a split of so many keys has, in whole blocks: a matter of the sequence's own length alone, and of the
// heads of a KV head. Few blocks are one split, which nothing has to be combined with.
__device__ __forceinline__ int split_keys(const Params& params, int length) {
  const int blocks = blocks_of(length, kBlockN);
  return (blocks <= kMostBlocks ? blocks : max(blocks_of(blocks, kNumSplits), params.least_blocks)) * kBlockN;
}

__device__ __forceinline__ int splits_of(const Params& params, int length) {
  return length > 0 ? blocks_of(length, split_keys(params, length)) : 0;
}

// Every row of a sequence has its splits.
__device__ __forceinline__ int splits_of(const Params& params, int batch, int) {
  return splits_of(params, sequence_of(params, batch).length);
}

// Keys of one KV head, a split's or those of several from this one on, for some queries of its group of heads: rows with
// heads side by side.
struct Unit {
  int batch, kv_head, split;
  Sequence sequence;
  int first_key, last_key;  // counted in its sequence
  int first_position, first_head;
  int rows;  // of queries

  // Of a KV head's tiles of rows, this one.
  __device__ __forceinline__ void take_rows(const Params& params, int row_tile) {
    const int position_tile = params.head_tiles.divide(row_tile);
    const int group_head = (row_tile - position_tile * params.head_tiles.value) * params.tile_heads.value;
    first_position = position_tile * params.tile_positions;
    first_head = kv_head * params.group + group_head;
    rows = min(params.tile_heads.value, params.group - group_head) *
           min(params.tile_positions, params.seqlen_q - first_position);
  }
};
