  __device__ __forceinline__ void fence_output() {
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
      fence_operand(o[i]);
    }
  }

  // The next buffer of the ring has K: its scores, and the product before them, are there at the end.
  __device__ __forceinline__ void finish_scores(Scores& s) {
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      fence_operand(s[i]);
    }
    arrive(shared.empty[tile.stage]);
    tile.advance();
  }
