// What statements of share may use: a thread puts what all rows share of a column into shared memory.
extern Columns columns;
extern const int column;
extern const float *means, *descales;  // of the head
