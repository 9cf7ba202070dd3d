  // Issues S of the step after this one. After the last it is that of what lies there, and not used: a condition here
  // would have ptxas wait for each product.
  __device__ __forceinline__ void issue_next_scores(Scores& s, bool more) {
    RingPosition<kStages> next = q;
    next.advance();
    if (more) {
      shared.q_full[next.stage].wait(next.phase);
    }
    issue_scores(s, next.stage);
  }

  // One block of rows, for dV and a part of dQ, whose S is there; when this ends, so is that of the next.
  template <bool masked>
  __device__ __forceinline__ void step(const Tile& tile, int block, bool more, Scores& s, ValueGradient& dv) {
    Packed p;
    make_p<masked>(tile, block, s, p);
    issue_dv(dv, p);
    issue_next_scores(s, more);
    wgmma_wait<1>();  // P's registers are free, and dO, whose ring may be of one
    fence_operand(dv);
    release(shared.dout_empty[dout().stage]);
    shared.ds_full[ds().stage].wait(ds().phase);
    QueryGradient dq;
    issue_dq_from(0, dq);
    wgmma_wait<0>();
    fence_operand(dq);
    fence_operand(s);
    release(shared.ds_empty[ds().stage]);
    pass_dq_on(dq, 0);
    advance();
  }

  // All of a tile.
  __device__ __forceinline__ void make_dv(const Tile& tile, ValueGradient& dv) {
    Scores s;
    if (tile.first < tile.last) {
      shared.q_full[0].wait(0);
      issue_scores(s, 0);
      wgmma_wait<0>();
      fence_operand(s);
    }
    take_steps(tile, s, dv);
  }

