// What statements of the kernel that combines splits may use once a row's are summed up, besides what combine.h has: with
// descales a row's `scale`, what K's mean adds to its scores, and numbers of two columns.
float times(float a, float b), plus(float a, float b), log_above(float s);
float average(float total, float inverse);
uint32_t pack(float low, float high);

extern const Params params;
extern const int batch, position, head, column;
extern const float reference, sum, total[2], inverse;
extern const float scale, of_mean;
extern const float2 factor, mean;  // of those columns
extern const float base, of_keys;  // with a sink: the largest log-sum-exp, and the sum that is the keys'

template <class Numbers>
float2 of_columns(const Numbers& numbers, float otherwise);
