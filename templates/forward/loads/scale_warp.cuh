// The warp that has no other work.
__device__ __forceinline__ void produce_scales(const Params& params, SharedStorage& shared) {
  ScaleProducer scales{params, shared};
  Tiles tiles{shared};
  for (Tile tile; tiles.next(params, tile);) {
    for (int block = tile.blocks.last - 1; block >= tile.blocks.first; --block) {
      scales.write(tile, block);
    }
  }
}
