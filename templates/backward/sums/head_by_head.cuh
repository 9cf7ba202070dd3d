  const int steps = tile.last - tile.first;
  for (int head = tile.first_head; head < tile.last_head; ++head) {
#pragma unroll 1  // few registers
    for (; step < steps; step += kDqAdders) {
      const int block = block_of(tile, step), turn = turn_of(lengths_of(params, shared), tile, block);
