  // The splits of a tile before this one, where this thread block has had all of them, lie in shared memory: registers hold
  // a split's alone. Each thread has its own numbers there: a column's sums of P V, score and sum of P.
  static constexpr int kCombinedScore = 2 * kColumnTiles, kCombinedSum = kCombinedScore + 1;
  bool combines = false;

  __device__ __forceinline__ void begin_combining() {
#pragma unroll
    for (int j = 0; j < kRows / 4; ++j) {
#pragma unroll
      for (int i = 0; i <= kCombinedSum; ++i) {
        shared.combined[j][i][threadIdx.x] = i == kCombinedScore ? -INFINITY : 0.0f;
      }
    }
  }

  // The split that has been computed follows those before it, in one of this thread's columns.
  __device__ __forceinline__ void combine(int j, float total) {
    const Share share = share_of(reference[j], total);
    const float score = shared.combined[j][kCombinedScore][threadIdx.x];
    const float weight = weigh(params.rise(score, share.x), 0.0f);
    const float old = old_weight(weight), own = own_weight(weight);
#pragma unroll
    for (int i = 0; i < 2 * kColumnTiles; ++i) {
      float& number = shared.combined[j][i][threadIdx.x];
      number = accumulate(number, o[i / 2][element_at(i, j)], old, own);
    }
    float& sum = shared.combined[j][kCombinedSum][threadIdx.x];
    sum = accumulate(sum, share.y, old, own);
    shared.combined[j][kCombinedScore][threadIdx.x] = fmaxf(score, share.x);
  }

  __device__ __forceinline__ float combined_reference_of(int j) const {
    return shared.combined[j][kCombinedScore][threadIdx.x];
  }
  __device__ __forceinline__ float combined_sum_of(int j) const { return shared.combined[j][kCombinedSum][threadIdx.x]; }

  template <class Store>
  __device__ __forceinline__ void for_each_combined(int j, Store store) {
    Output combined;
#pragma unroll
    for (int i = 0; i < 2 * kColumnTiles; ++i) {
      combined[i / 2][element_at(i, j)] = shared.combined[j][i][threadIdx.x];
    }
    for_each_number(combined, j, store);
  }
