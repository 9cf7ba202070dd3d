  // How many warpgroups have rows of a tile: counted, since a division would be seen of very short tiles.
  __device__ __forceinline__ int warpgroups_from(int first_row) const {
    const int left = sequence.seqlen_q - first_row;
    int warpgroups = 1;
#pragma unroll
    for (int i = 1; i < kConsumers; ++i) {
      warpgroups += left > i * params.queries;
    }
    return warpgroups;
  }
