  __device__ __forceinline__ KeyBlock& share_of(const Tile&) const { return params.key_blocks[shared.sequence.kept]; }

