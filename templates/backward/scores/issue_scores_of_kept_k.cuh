  uint32_t k[kHeadDimPadded / 4];  // its 64 keys, as a left operand: four registers for each step of K

  // Takes 64 rows of K to registers.
  template <int slab, int swizzle_bits, int count>
  __device__ __forceinline__ void load_keys(uint32_t (&keys)[count], const Element* tile) {
    const int row = first_row() + warp_row() + lane() % 16;
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      const int column = i * 4;
      const char* base = reinterpret_cast<const char*>(tile + column / slab * kBlockN * slab);
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3 }, [%4];"
                   : "=r"(keys[i]), "=r"(keys[i + 1]), "=r"(keys[i + 2]), "=r"(keys[i + 3])
                   : "r"(cute::cast_smem_ptr_to_uint(base + swizzled<slab, swizzle_bits>(row, column % slab + lane() / 16 * 8))));
    }
  }

  // Issues S = K Qᵀ - lse, of the Q in a stage.
  __device__ __forceinline__ void issue_scores(Scores& s, int stage) {
    const Descriptor rows = descriptor<kQkSlab>(shared.q[stage], kQkDescriptor);
    fence_operand(k);
    issue_statistics(s, stage, kOfLse);
#pragma unroll
    for (int d = 0; d < kHeadDimPadded; d += kStepK) {
      wgmma_kept<true>(s, k + d / 4, rows + column_offset<kBlockM, kQkSlab>(d));
    }
    wgmma_commit();
  }

