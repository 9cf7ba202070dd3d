// Whether a row of a unit was too far below its reference. Asked by threads of the block that computed it.
__device__ __forceinline__ bool has_failed(const Params& params, const Unit& unit, int row) {
  const int position = params.tile_heads.divide(row), head = row - position * params.tile_heads.value;
  const int64_t index = params.partial(unit.batch, unit.split, unit.first_position + position, unit.first_head + head);
  return row < unit.rows && __ldcg(&params.shares[index].x) == INFINITY;
}
