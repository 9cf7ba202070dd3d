  __device__ __forceinline__ void finish_dk(KeyGradient& dk) {
    wgmma_wait<0>();
    fence_operand(dk);
    release(shared.q_empty[q.stage]);
  }

