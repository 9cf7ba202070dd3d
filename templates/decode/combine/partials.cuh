  // Hands the split's output on.
  __device__ __forceinline__ void finish(const Unit& unit) {
    for_each_row(unit, [&](int j, float total, int position, int head) {
      const int64_t index = params.partial(unit.batch, unit.split, position, head);
      store_partial(j, index);
      store_share(j, index, total);
    });
  }
