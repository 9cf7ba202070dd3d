// Parts of dQ are added up in the order of the keys, so that their sum is the same bit for bit: what one tile has added is
// made known while the next adds. A tile waits for tiles only that were begun before it.
__device__ __forceinline__ void await_turn(const uint32_t* added, int turn) { await_count(added, turn); }

__device__ __forceinline__ void end_turn(uint32_t* added, int) {
  await_additions();
  release(added);
}
