// Parts of dQ are added up in any order but for the first, which is stored. A tile waits for tiles only that were begun before
// it.
__device__ __forceinline__ void await_turn(const uint32_t* added, int turn) { await_count(added, min(turn, 1)); }

__device__ __forceinline__ void end_turn(uint32_t* added, int turn) {
  if (turn == 0) {
    await_additions();
    release(added);
  }
}
