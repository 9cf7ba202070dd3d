// The address of what lies there in the other block's shared memory.
__device__ __forceinline__ uint32_t at_peer(const void* own) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(cute::cast_smem_ptr_to_uint(own)), "r"(1 - cluster_rank()));
  return address;
}

// Copies to the same place in the other block, whose barrier there counts the bytes.
__device__ __forceinline__ void copy_to_peer(const void* from, const void* to, const TransactionBarrier& full, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(at_peer(to)),
               "r"(cute::cast_smem_ptr_to_uint(from)), "r"(bytes), "r"(at_peer(&full))
               : "memory");
}
