  // Hands the split's output on: where a sequence has no other, as its output.
  __device__ __forceinline__ void finish(const Unit& unit) {
    const bool alone = unit.last_key - unit.first_key == unit.sequence.length;
    for_each_row(unit, [&](int j, float total, int position, int head) {
      if (alone) {
        store_output(unit, j, total, position, head);
        return;
      }
      const int64_t index = params.partial(unit.batch, unit.split, position, head);
      store_partial(j, index);
      store_share(j, index, total);
    });
  }
