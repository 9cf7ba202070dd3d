  RingPosition<kQStages> q;
  RingPosition<kStages> k, v;
  bool k_ready = false, v_ready = false;  // try_wait results of the current K and V

  __device__ __forceinline__ void wait_q() { shared.q_full[q.stage][warpgroup].wait(q.phase); }

  __device__ __forceinline__ void release_q(bool final_block) {
    if (lane() == 0 && final_block) {
      shared.q_empty[q.stage][warpgroup].arrive();
    }
  }

  // Even a successful wait has latency. So a try_wait for the next buffer is issued when one is released, and
  // its result arrives under the softmax.
  __device__ __forceinline__ void wait_k() {
    if (!k_ready) {
      shared.k_full[k.stage].wait(k.phase);
    }
  }

  __device__ __forceinline__ void release_k() {
    release(shared.k_empty[k.stage]);
    k.advance();
    k_ready = shared.k_full[k.stage].test_wait(k.phase);
  }

  __device__ __forceinline__ void wait_v() {
    if (!v_ready) {
      shared.v_full[v.stage].wait(v.phase);
    }
  }

  __device__ __forceinline__ void release_v() {
    release(shared.v_empty[v.stage]);
    v.advance();
    v_ready = shared.v_full[v.stage].test_wait(v.phase);
  }
