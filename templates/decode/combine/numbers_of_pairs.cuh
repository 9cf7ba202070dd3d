  // Calls store(column, number) for what this thread has of an output's row.
  template <class Store>
  __device__ __forceinline__ void for_each_number(Output& output, int j, Store store) {
#pragma unroll
    for (int i = 0; i < 2 * kColumnTiles; ++i) {
      const int column = row_at(i) - own_of(j) * kHalfSlab;  // a second head's first slab has half of its columns
      if (column >= 0 && column < kHeadDimV) {
        store(column, output[i / 2][element_at(i, j)]);
      }
    }
  }
