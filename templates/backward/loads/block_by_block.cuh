  __device__ __forceinline__ void run(const Tile& tile) {
    RingPosition<kStages> q;
    RingPosition<kDoStages> dout;
    load_k(tile);
    shared.v_full.arrive_and_expect_tx(sizeof(shared.v));
    copy_keys<kHeadDimVPadded, kVSlab>(params.v, shared.v_full, shared.v, tile);
    for (int block = tile.last - 1; block >= tile.first; --block) {
#pragma unroll 1
      for (int head = tile.first_head; head < tile.last_head; ++head) {
        load_q(q, tile, head, block, kQBytes);
        q.advance();
        load_dout(dout, tile, head, block, kDoutBytes);
        dout.advance();
      }
    }
  }
