// Of a row tensor cores add -delta to products of its: as the sum of eight bf16, core matrices of eight rows. Behind them lies
// what exponents of 2 are less, once their scores are worked out: LSEs.
using Statistics = uint4[kBlockM + kBlockM / 4];

// By where its ones lie.
enum Statistic { kOfDelta = 1 };
