// What a thread adds up of P in its two rows: one chain a row, since several groups hide latency.
using Chains = float[2];

__device__ __forceinline__ void add_to(Chains& chains, int i, float p, bool first) {
  float& chain = chains[row_of(i)];
  chain = first && i % 2 == 0 && i < 4 ? p : chain + p;
}

__device__ __forceinline__ float sum_of(const Chains& chains, int row) { return chains[row]; }
