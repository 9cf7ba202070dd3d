  __device__ __forceinline__ int seqlen_k(const Tile& tile) const { return params.seqlen_k; }
