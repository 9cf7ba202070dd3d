  // dQ of others' dS alone.
  __device__ __forceinline__ void multiply_others_ds() {
    QueryGradient dq;
    issue_own_dq(dq);
    wgmma_wait<0>();
    fence_operand(dq);
    pass_dq_on(dq, warpgroup);
    if constexpr (computes_dq) {
      issue_dq_of(kConsumers, dq);
      wgmma_wait<0>();
      fence_operand(dq);
      pass_dq_on(dq, kConsumers);
    }
  }
