// The tiles for the producer, who says when the next one is to be drawn.
struct TileRequests : Tiles {
  // By a single thread.
  __device__ __forceinline__ void take() { shared.tile_empty[taken++ % kTileStages].arrive(); }

  __device__ __forceinline__ void draw() { shared.tile_wanted.arrive(); }

  // The block of a tile at which the next tile is drawn.
  __device__ __forceinline__ static int draws_at(const Blocks& blocks) { return blocks.first + kDrawAhead; }
};
