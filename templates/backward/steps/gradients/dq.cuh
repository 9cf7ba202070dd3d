  // Issues dQ of the columns of K from one on.
  template <int count>
  __device__ __forceinline__ void issue_dq_from(int column, float (&dq)[count]) {
    issue_dq(dq, shared.ds[ds().stage], shared.k + column * kBlockN);
  }

  // dS is there, for both warpgroups.
  __device__ __forceinline__ void pass_ds_on() {
    cutlass::arch::fence_view_async_shared();
    arrive(shared.ds_full[ds().stage]);
  }

