// Of keys that share a scale. V's descales are multiplied into P, and divided out of its row sums.
struct alignas(16) KeyScales {
  float k, log2_v, inverse_v;
};
using BlockScales = KeyScales[kGroups];
