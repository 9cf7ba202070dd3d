  // Calls hand_on(j, total, position, head) for each of this thread's columns that is a row of the unit, with the sum of
  // its P.
  template <class HandOn>
  __device__ __forceinline__ void for_each_row(const Unit& unit, HandOn hand_on) {
    add_up_sums();
#pragma unroll
    for (int j = 0; j < kRows / 4; ++j) {
      if (!takes(unit, j)) {
        continue;
      }
      const int row = column_at(j);
      float total = 0.0f;
#pragma unroll
      for (int other = 0; other < kWarps; ++other) {
        total += shared.sums[other][row];
      }
      const int position = params.tile_heads.divide(row);
      const int head = row - position * params.tile_heads.value;
      hand_on(j, total, unit.first_position + position, unit.first_head + head);
    }
  }
