// The first unit of a thread block, as far as keys go, where tiles stay whole for want of lengths.
__device__ __forceinline__ Unit first_of_whole(const Params& params) {
  const int run = params.abreast.divide(blockIdx.x), runs = params.abreast.divide(gridDim.x);
  const int group = begin_of(run, params.batch * params.tile_groups.value, runs);
  Unit unit{};
  unit.batch = params.tile_groups.divide(group);
  const int tile = tile_of(params, group - unit.batch * params.tile_groups.value);
  unit.kv_head = params.row_tiles.divide(tile);
  unit.last_key = params.seqlen_k;
  return unit;
}
