// The first query head of a unit's rows, of one of its KV heads. Units count their KV heads together.
__device__ __forceinline__ int first_head_of(const Params& params, const Unit& unit, int own) {
  return unit.first_head + (unit.kv_head * (kKvHeads - 1) + own) * params.group;
}
