// ---- Partial outputs -------------------------------------------------------------------------

// 16 bytes of a partial output, past the L1 cache: it is read once. Never through the read-only path, since the launch
// before this one may have written it while this one was already there.
__device__ __forceinline__ void load(uint4& slot, const Element* from) {
  const uint32_t to = uint32_t(__cvta_generic_to_shared(&slot));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Loads are waited for in groups, in the order in which these are closed.
__device__ __forceinline__ void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ void wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 1) : "memory");
}
