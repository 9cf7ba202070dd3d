// The first of so many tiles of a head that sees so many blocks: all see the last key.
__device__ __forceinline__ int first_tile_with(const Sequence& sequence, int tiles, int least) {
  return ceil_div(sequence.seqlen_k, kBlockN) < least ? tiles : 0;
}
