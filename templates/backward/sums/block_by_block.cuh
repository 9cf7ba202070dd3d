  const int steps = tile.last_head - tile.first_head;
  for (int block = tile.last - 1; block >= tile.first; --block) {
#pragma unroll 1  // few registers
    for (; step < steps; step += kDqAdders) {
      const int head = tile.first_head + step, turn = turn_of(lengths_of(params, shared), tile, block);
