  // Whether the scores of the first block are so widely spread, in most rows of the warp, that of its keys the largest
  // alone counts: then later blocks are likely to outgrow it.
  __device__ __forceinline__ bool spread() const {
    return __popc(__ballot_sync(0xffffffff, sum[0] + sum[1] < kSpreadSum)) > kSpreadThreads;
  }
