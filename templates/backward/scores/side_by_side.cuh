// Of a row tensor cores add two numbers to products of its: as sums of three bf16 each, side by side, core matrices of eight
// rows.
using Statistics = uint4[kBlockM];

// What of a row's statistics a product adds, by where its ones lie.
enum Statistic { kOfDelta, kOfLse };
