  __device__ __forceinline__ void run(const Tile& tile) {
    RingPosition<kStages> q;
    RingPosition<kDoStages> dout;
    load_k(tile);
    shared.v_full.arrive_and_expect_tx(sizeof(shared.v));
    copy_keys<kHeadDimVPadded, kVSlab>(params.v, shared.v_full, shared.v, tile);
    for (int head = tile.first_head; head < tile.last_head; ++head) {
#pragma unroll 1
      for (int step = 0; step < tile.last - tile.first; ++step) {
        const int block = block_of(tile, step);
        load_q(q, tile, head, block, kQBytes);
        q.advance();
        load_dout(dout, tile, head, block, kDoutBytes);
        dout.advance();
      }
    }
  }
