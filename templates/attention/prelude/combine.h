// What statements of the kernel that combines splits may use: where a row's begin. They say how many `splits` there are, and
// at `most` of the rows of a warp; the `first` of them and the `step` to the next; and what `reference`, `sum` and `total`
// begin with, once the launch before has ended. Where there are descales they also say a row's `scale`, what K's mean adds, and
// numbers of two columns.
constexpr int kWindow = 8, kCombineLanes = 32, kCombineRows = 8, kWeighed = 32;

struct Window {
  Share share;
  float2 numbers[kWindow];
};

int splits_of(const Params& params, int batch, int position);
int splits_before(const Params& params, int position);
void wait_for_launch_before();
void let_next_launch_begin();

extern const Params params;
extern const bool there;  // whether this is a row
extern const int batch, position, head, column;
