  __device__ __forceinline__ static int seqlen_k(const Tile& tile) { return tile.sequence.seqlen_k; }
