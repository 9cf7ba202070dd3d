// What the kernel may use of its parts, beside the head and how splits are weighed. These use nothing of each other. A test
// parses the kernel behind it.

// Rows: where the partial outputs of one are, and where it goes; how many splits it has, and at most of the rows of a warp.
struct Row {};

Row row_at(const Params& params, int number);
const Element* outs_of(const Params& params, const Row& row, int column);
const float* lses_of(const Params& params, const Row& row);
Output* out_of(const Params& params, const Row& row, int column);
float* lse_of(const Params& params, const Row& row);
void count_splits(const Params& params, const Row& row, bool there, int& splits, int& most);

// Partials: loads of 16 bytes, which are waited for in groups, and the numbers of one.
void load(uint4& slot, const Element* from);
void close_group();
void wait_group();
void widen(const uint4& raw, float (&numbers)[kVector]);

// Output.
void store(Output* to, const float (&numbers)[kVector]);
