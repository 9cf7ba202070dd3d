// The first unit of a thread block, as far as keys go, where tiles stay whole for want of lengths.
__device__ __forceinline__ Unit first_of_whole(const Params& params) {
  const int run = params.abreast.divide(blockIdx.x), group = begin_of_whole(params, run);
  Unit unit{};
  unit.batch = params.tile_groups.divide(group);
  const int tile = tile_of(params, group - unit.batch * params.tile_groups.value);
  unit.kv_head = params.row_tiles.divide(tile);
  unit.last_key = group < begin_of_whole(params, run + 1) ? params.seqlen_k : 0;  // who takes turns alone has none
  return unit;
}
