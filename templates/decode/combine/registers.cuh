  // The splits of a tile before this one, where this thread block has had all of them.
  bool combines = false;
  Output combined;
  Statistics combined_reference, combined_sum;

  __device__ __forceinline__ void begin_combining() {
#pragma unroll
    for (int j = 0; j < kRows / 4; ++j) {
      combined_reference[j] = -INFINITY;
      combined_sum[j] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kRows / 2; ++j) {
        combined[i][j] = 0.0f;
      }
    }
  }

  // The split that has been computed follows those before it, in one of this thread's columns.
  __device__ __forceinline__ void combine(int j, float total) {
    const Share share = share_of(reference[j], total);
    const float weight = weigh(params.rise(combined_reference[j], share.x), 0.0f);
    const float old = old_weight(weight), own = own_weight(weight);
#pragma unroll
    for (int i = 0; i < 2 * kColumnTiles; ++i) {
      combined[i / 2][element_at(i, j)] = accumulate(combined[i / 2][element_at(i, j)], o[i / 2][element_at(i, j)], old, own);
    }
    combined_sum[j] = accumulate(combined_sum[j], share.y, old, own);
    combined_reference[j] = fmaxf(combined_reference[j], share.x);
  }

  __device__ __forceinline__ float combined_reference_of(int j) const { return combined_reference[j]; }
  __device__ __forceinline__ float combined_sum_of(int j) const { return combined_sum[j]; }

  template <class Store>
  __device__ __forceinline__ void for_each_combined(int j, Store store) {
    for_each_number(combined, j, store);
  }
