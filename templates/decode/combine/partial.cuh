  // Hands a split's output of a row on.
  __device__ __forceinline__ void store_partial(int j, int64_t index) {
    float* const to = params.partials + index * kHeadDimV;
    for_each_number(o, j, [&](int column, float number) { __stcg(to + column, number); });
  }
