// ---- Adding dQ up ----------------------------------------------------------------------------

// Adds to global memory; reads shared memory as TMA does.
__device__ __forceinline__ void bulk_add(float* to, const float* from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(cute::cast_smem_ptr_to_uint(from)), "r"(bytes)
               : "memory");
}

// The same, of what nobody has added to yet.
__device__ __forceinline__ void bulk_store(float* to, const float* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(cute::cast_smem_ptr_to_uint(from)), "r"(bytes)
               : "memory");
}

// Until all that this thread has added is in global memory.
__device__ __forceinline__ void await_additions() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ uint32_t acquire(const uint32_t* added) {
  uint32_t now;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(added) : "memory");
  return now;
}

// Until so many were counted: what they added is there, and TMA may add to it.
__device__ __forceinline__ void await_count(const uint32_t* added, uint32_t count) {
  while (int(acquire(added) - count) < 0) {
  }
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Counts one more, for what this thread has added.
__device__ __forceinline__ void release(uint32_t* added) {
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(added) : "memory");
}
