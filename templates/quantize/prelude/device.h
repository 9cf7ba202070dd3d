// What functions, kernels and their statements may use of each other, beside the head. A test parses each behind it.

// Rows: a lane's two of a warp's 16, and the first of its eight columns of a chunk.
int lane_id();
int row_of(int which);
int column_of(int chunk);
void put(const uint4& eight, uint32_t (&words)[4]);
template <bool last> void load(const Params& params, const Element* in, int first, int pass, Raw& raw);

// Rotary embeddings, of rows as they came; pairs of numbers that turn together.
void rotate_pair(uint32_t& first, uint32_t& second, uint32_t cosines, uint32_t sines);
void embed(const Element* cos, const Element* sin, uint32_t (&row)[kChunks][4]);
void apply_rotary(const Params& params, int batch, int first, int pass, Raw& raw);

// Rotation, after which rows are values; or these are the numbers themselves.
float hadamard(int k, int n);
void rotate(const Params& params, const Raw& raw, Values& y);
void widen(const Raw& raw, Values& y);

// Columns: what all rows of a head share, in shared memory.
struct Columns {
  float means[32 * kChunks], scales[32 * kChunks];
};

void share(const Params& params, const Tile& tile, Columns& columns);
void read(const float* columns, int chunk, float (&x)[8]);
void center(const Columns& columns, Values& y);
void divide(const Columns& columns, Values& y);
float together(int number, float a, float b);  // of two rows, what is known of a column by this number

// All of that: a warp's rows, but for a scale.
template <bool last> void get(const Params& params, const Element* in, const Tile& tile, int first, int pass, Values& y);
template <bool last> void get(const Params& params, const Element* in, const Tile& tile, Columns& columns, int first, int pass, Values& y);

// Scales: maxima of a thread, a warp, a thread block; which rows this one has.
float largest(const Values& y);
float warp_maximum(float top);
template <int warps> float block_maximum(float top);
int place();

// Output: a lane's share of a row, or a thread block's rows transposed in shared memory.
using Packed = uint32_t[kChunks][2];
void pack(const float (&y)[kChunks][8], float scale, Packed& packed);
void store(const Params& params, uint8_t* out, int row, const Packed& packed);
void transpose(uint8_t* tile, const Packed (&packed)[2]);
void store(const Params& params, uint8_t* out, int first, const uint8_t* tile);
