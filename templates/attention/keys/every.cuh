// The keys first … last - 1 that a row sees: all.
struct Keys {
  int first, last;
};

__host__ __device__ __forceinline__ Keys seen_by(const Lengths& lengths, int) { return {0, lengths.seqlen_k}; }
