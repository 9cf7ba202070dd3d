  __device__ __forceinline__ static int seqlen_q(const Tile& tile) { return tile.sequence.seqlen_q; }
