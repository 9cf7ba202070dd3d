  // Issues dQ += dS K, of the other block's keys.
  template <int count>
  __device__ __forceinline__ void issue_peer_dq(float (&dq)[count], const Element* rows, const Element* columns) {
    const Descriptor a = along_columns<kBlockN, kDsSlab>(rows, kDsDescriptor);
    const Descriptor b = along_columns<kBlockN, kQkSlab>(columns, kQkDescriptor);
    fence_operand(dq);
    wgmma_fence();
#pragma unroll
    for (int key = 0; key < kBlockN; key += kStepK) {
      wgmma_dq<true>(dq, a + row_offset<kDsSlab>(key), b + row_offset<kQkSlab>(key));
    }
    wgmma_commit();
  }

  // Issues dQ of both blocks' keys and this block's columns of K from one on.
  template <int count>
  __device__ __forceinline__ void issue_dq_from(int column, float (&dq)[count]) {
    shared.ds_peer_full[ds().stage].wait(ds().phase);
    issue_dq(dq, shared.ds[ds().stage], shared.k + (cluster_rank() * kHeadDimPadded / kCluster + column) * kBlockN);
    issue_peer_dq(dq, shared.ds_peer[ds().stage], shared.k_peer + column * kBlockN);
  }

  // dS is there, for both warpgroups, and for those of the other block once it has come there.
  __device__ __forceinline__ void pass_ds_on() {
    cutlass::arch::fence_view_async_shared();
    barrier_sync(kKeyConsumer, kWarpgroup);  // all of it is there
    if (threadIdx.x % kWarpgroup == 0) {
      TransactionBarrier& full = shared.ds_peer_full[ds().stage];
      full.arrive_and_expect_tx(sizeof(shared.ds[0]));
      copy_to_peer(shared.ds[ds().stage], shared.ds_peer[ds().stage], full, sizeof(shared.ds[0]));
    }
    arrive(shared.ds_full[ds().stage]);
  }

