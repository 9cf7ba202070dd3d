// Tiles of whole rounds, then parts of the keys of the others, those of a tile side by side.
__device__ __forceinline__ Tile tile_at(const Params& params, int index) {
  const int unit = index - params.whole;
  const int last = params.parts.divide(max(unit, 0));
  const int number = unit < 0 ? index : params.whole + last;
  const int flat_head = params.m_blocks.divide(number);  // neighbours share K and V
  Tile tile = tile_of(params, flat_head, number - flat_head * params.m_blocks.value);
  tile.unit = unit;
  if (unit >= 0) {
    tile.blocks.first = (unit - last * params.parts.value) * params.part_blocks;
    tile.blocks.last = min(tile.blocks.last, tile.blocks.first + params.part_blocks);
  }
  return tile;
}
