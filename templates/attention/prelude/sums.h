// What statements of the kernel that combines splits may use where more joins a row's sums, besides what combine.h has: with
// descales a row's `scale`, and what K's mean adds to its scores.
float times(float a, float b), plus(float a, float b);
void combine_sink(float sink, float& base, float& sum, float& old);

extern const Params params;
extern const float sink;
extern float reference, sum, total[2];
extern const float scale, of_mean;
