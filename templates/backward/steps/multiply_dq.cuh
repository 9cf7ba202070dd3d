  // Issues a part of dQ, of two operands with keys along their rows.
  template <int slab_a, int slab_b, int count>
  __device__ __forceinline__ void multiply_dq(float (&dq)[count], Descriptor a, Descriptor b) {
    fence_operand(dq);
    wgmma_fence();
    wgmma_dq<false>(dq, a, b);
#pragma unroll
    for (int key = kStepK; key < kBlockN; key += kStepK) {
      wgmma_dq<true>(dq, a + row_offset<slab_a>(key), b + row_offset<slab_b>(key));
    }
    wgmma_commit();
  }

