// Which of a thread's two rows element i is in, and which column, counted as above.
__device__ constexpr int row_of(int i) { return i / 2 % 2; }
__device__ constexpr int column_of(int i) { return i / 4 * 8 + i % 2; }
