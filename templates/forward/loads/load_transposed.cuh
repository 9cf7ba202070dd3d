// ---- Transposing V ---------------------------------------------------------------------------

// wgmma reads 8-bit V along its keys only, and here in the order of keys in which P lies in registers.

// Loads four 8x8 matrices of 16-bit elements, transposed; each lane gives the address of one row.
__device__ __forceinline__ void load_transposed(const void* address, uint32_t (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3 }, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(cute::cast_smem_ptr_to_uint(address))
               : "memory");
}
