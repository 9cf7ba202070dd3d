  RingPosition<kQStages> q;
  RingPosition<kStages> k, v;

  __device__ __forceinline__ void wait_q() { shared.q_full[q.stage][warpgroup].wait(q.phase); }

  __device__ __forceinline__ void release_q(bool final_block) {
    if (lane() == 0 && final_block) {
      shared.q_empty[q.stage][warpgroup].arrive();
    }
  }

  __device__ __forceinline__ void wait_k() { shared.k_full[k.stage].wait(k.phase); }

  __device__ __forceinline__ void release_k() {
    release(shared.k_empty[k.stage]);
    k.advance();
  }

  __device__ __forceinline__ void wait_v() { shared.v_full[v.stage].wait(v.phase); }

  __device__ __forceinline__ void release_v() {
    release(shared.v_empty[v.stage]);
    v.advance();
  }
