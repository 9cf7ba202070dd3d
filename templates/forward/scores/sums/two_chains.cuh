// What a thread adds up of P in its two rows: two chains a row, to hide latency.
using Chains = float[4];

__device__ __forceinline__ void add_to(Chains& chains, int i, float p, bool first) {
  const int chain = row_of(i) + i % 2 * 2;
  chains[chain] = first && i < 4 ? p : chains[chain] + p;
}

__device__ __forceinline__ float sum_of(const Chains& chains, int row) { return chains[row] + chains[row + 2]; }
