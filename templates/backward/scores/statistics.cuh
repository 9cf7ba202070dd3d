// Of a row tensor cores add two numbers to products of its: as sums of eight bf16, core matrices of eight rows side by side,
// first of one number and then of the other.
using Statistics = uint4[2 * kBlockM];

__device__ constexpr int lse_of(int row) { return row / 8 * 16 + row % 8; }
__device__ constexpr int delta_of(int row) { return lse_of(row) + 8; }
