// Transposes the next block, as one of the warps of the producer's warpgroup that do not load.
template <int transposer>
__device__ __forceinline__ void transpose_block(SharedStorage& shared, RingPosition<kStages>& v) {
  shared.v_rows_full.wait(v.stage % 2);
  shared.v_empty[v.stage].wait(v.phase ^ 1);
  transpose<transposer>(shared.v_rows, shared.v[v.stage]);
  // For what wgmma reads and for what TMA overwrites.
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
  if (lane() == 0) {
    shared.v_full[v.stage].arrive();
    shared.v_rows_empty.arrive();
  }
  v.advance();
}
