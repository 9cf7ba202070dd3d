// The tiles that the producer draws, for one of the others.
struct Tiles {
  SharedStorage& shared;
  RingPosition<kTileStages> next;

  // The next tile, which stays where it is until whoever took it arrives; none where its first_key is negative.
  __device__ __forceinline__ const Tile& look() const {
    shared.tile_full[next.stage].wait(next.phase);
    return shared.tiles[next.stage];
  }

  __device__ __forceinline__ Barrier& take() {
    Barrier& empty = shared.tile_empty[next.stage];
    next.advance();
    return empty;
  }
};
