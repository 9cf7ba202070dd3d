  // The rest of a step, while dV is on its way: dK, and this warpgroup's part of dQ; the last has one more, behind the first.
  __device__ __forceinline__ void multiply_ds(KeyGradient& dk, ValueGradient& dv, QueryGradient& dq, Packed& d_scores) {
    issue_own_dq(dq);
    wgmma_wait<1>();
    fence_operand(dv);
    arrive(shared.dout_empty[dout().stage]);
    issue_dk(dk, d_scores);
    wgmma_wait<1>();
    fence_operand(dq);
    pass_dq_on(dq, warpgroup);
    if constexpr (computes_dq) {
      issue_dq_of(kConsumers, dq);
      wgmma_wait<1>();
      fence_operand(dk);
      arrive(shared.q_empty[q.stage]);
      wgmma_wait<0>();
      fence_operand(dq);
      pass_dq_on(dq, kConsumers);
    } else {
      wgmma_wait<0>();
      fence_operand(dk);
      arrive(shared.q_empty[q.stage]);
    }
  }

  // Issues one of dQ's parts.
  __device__ __forceinline__ void issue_dq_of(int part, QueryGradient& dq) {
    issue_dq(dq, shared.ds[ds().stage] + part * kDqRowStep * kBlockN, shared.k + part * kDqColumnStep * kBlockN);
  }

  // Issues this warpgroup's part of dQ, once all have stored their dS.
  __device__ __forceinline__ void issue_own_dq(QueryGradient& dq) {
    barrier_sync(kAllConsumers, kConsumers * kWarpgroup);
    issue_dq_of(warpgroup, dq);
  }
