
  // All of a tile; returns the number of its successor, which is drawn before the last step is loaded: this far ahead of the
  // consumers nobody waits for the answer.
  __device__ __forceinline__ int load(const Tile& tile) {
    if (tile.first >= tile.last) {
      return draw(params.tiles);
    }
    int drawn = 0;
    for (int block = tile.last - 1; block >= tile.first; --block) {
#pragma unroll 1
      for (int head = tile.first_head; head < tile.last_head; ++head) {
        const bool first = block + 1 == tile.last && head == tile.first_head;
        if (block == tile.first && head + 1 == tile.last_head) {
          drawn = draw(params.tiles);
        }
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
