
  // All of a tile; returns the number of its successor, which is drawn before the last step is loaded: this far ahead of the
  // consumers nobody waits for the answer.
  __device__ __forceinline__ int load(const Tile& tile) {
    const int steps = tile.last - tile.first;
    if (steps <= 0) {
      return draw(params.tiles);
    }
    int drawn = 0;
    for (int head = tile.first_head; head < tile.last_head; ++head) {
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        const bool first = head == tile.first_head && step == 0;
        if (head + 1 == tile.last_head && step + 1 == steps) {
          drawn = draw(params.tiles);
        }
        const int block = block_of(tile, step);
        load_q(q, tile, head, block, kQBytes + first * sizeof(shared.k));
        load_dout(dout, tile, head, block, kDoutBytes + first * sizeof(shared.v));
        if (first) {  // behind Q and dO, for which there is room while the tile before is in work
          load_keys(tile);
        }
        q.advance();
        dout.advance();
      }
    }
    return drawn;
  }
