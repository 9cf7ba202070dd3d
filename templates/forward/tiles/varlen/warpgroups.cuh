  // How many warpgroups have rows of a tile.
  __device__ __forceinline__ int warpgroups_from(int first_row) const {
    return min(ceil_div(sequence.seqlen_q - first_row, kWarpgroupRows), kConsumers);
  }
