constexpr int kWeighed = kCombineLanes < 32 ? kCombineLanes : 32;  // splits whose weights lanes work out at a time

// Splits of a row, as one lane has them: its own columns.
struct Window {
  float2 numbers[kWindow];
};
