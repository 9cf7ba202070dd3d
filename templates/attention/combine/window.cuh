// Splits of a row, as one lane has them: the share of one of them, and its own columns of all.
struct Window {
  Share share;
  float2 numbers[kWindow];
};
