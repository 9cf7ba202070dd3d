  __device__ __forceinline__ int seqlen_q(const Tile&) const { return params.seqlen_q; }
