  // One block of rows, for dV and a part of dQ.
  template <bool masked>
  __device__ __forceinline__ void step(const Tile& tile, int block, ValueGradient& dv) {
    Scores s;
    shared.q_full[q.stage].wait(q.phase);
    issue_scores(s, q.stage);
    wgmma_wait<0>();
    fence_operand(s);
    Packed p;
    make_p<masked>(tile, block, s, p);
    issue_dv(dv, p);
    wgmma_wait<0>();  // P's registers are free, and dO, whose ring may be of one
    fence_operand(dv);
    release(shared.dout_empty[dout().stage]);
    shared.ds_full[ds().stage].wait(ds().phase);
    QueryGradient dq;
    issue_dq_from(0, dq);
    wgmma_wait<0>();
    fence_operand(dq);
    release(shared.ds_empty[ds().stage]);
    pass_dq_on(dq, 0);
    advance();
  }

  // All of a tile.
  __device__ __forceinline__ void make_dv(const Tile& tile, ValueGradient& dv) { take_steps(tile, dv); }

