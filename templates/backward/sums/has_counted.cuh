// Whether so many were counted: then what they added is there, and TMA may read it.
__device__ __forceinline__ bool has_counted(const uint32_t* added, uint32_t count) {
  if (int(acquire(added) - count) < 0) {
    return false;
  }
  asm volatile("fence.proxy.async.global;" ::: "memory");
  return true;
}
