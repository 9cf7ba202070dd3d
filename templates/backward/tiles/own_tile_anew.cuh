// A thread block's tile, worked out once more where it ends: registers hold little of it meanwhile.
__device__ __forceinline__ Tile own_tile_anew(const Params& params) {
  int index = blockIdx.x / kCluster;
  asm volatile("" : "+r"(index));  // else the compiler knows that it has it
  return tile_of(params, index);
}
