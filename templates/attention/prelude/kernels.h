// What the kernel that combines splits may use, beside the head: how splits are weighed, by operations that are rounded each by
// itself; how many there are of a row, and before it; what an output is; statements of combine.h, which begin where a row's do,
// and of combined.h.
float times(float a, float b), plus(float a, float b), log_above(float s);
float weigh(float lse, float maximum), old_weight(float weight), own_weight(float weight);
float accumulate(float sum, float number, float old, float own);
void combine_sink(float sink, float& base, float& sum, float& old);

int splits_of(const Params& params, int batch, int position);
int splits_before(const Params& params, int position);

float average(float total, float inverse);
uint32_t pack(float low, float high);

void wait_for_launch_before();
void let_next_launch_begin();
