// What texts of loader, consumer and kernel may use, beside the head, sm90/ and how splits are combined: their interface.
// A test parses each behind it.

struct Sequence {
  int first, length;  // of keys, in the cache
};

struct Lengths {
  int seqlen_q, seqlen_k;
};

struct Keys {
  int first, last;
};

Keys seen_by(const Lengths& lengths, int row);

// Keys of a KV head, for some queries: deals.
struct Unit {
  int batch, kv_head, split;
  Sequence sequence;
  int first_key, last_key, first_position, first_head, rows;
  void take_rows(const Params& params, int row_tile);
};

int split_keys(const Params& params, int length);

// Units of a thread block: each has next or find.
struct Units {
  bool in_turns;
  explicit Units(const Params& params);
  bool next(Unit& unit);
  bool find(int number, Unit& unit);
  bool take_turns();  // behind whole tiles: whether splits of others are left
};

Unit first_of_whole(const Params& params);
int first_head_of(const Params& params, const Unit& unit, int own);  // where a tile has several KV heads
bool has_failed(const Params& params, const Unit& unit, int row);  // by a fixed maximum

// Products, what becomes of them, and where an accumulator's numbers are.
float tanh_approx(float x), sqrt_approx(float x);
void combine_sink(float sink, float& base, float& sum, float& old);
uint32_t row_offset(int row);
template <bool accumulate, int n>
void wgmma_scores(float (&s)[n], Descriptor keys, Descriptor queries);
template <bool accumulate, int n>
void wgmma_output(float (&o)[n], Descriptor values, Descriptor p);
int column_at(int j);
int row_at(int i);
int element_at(int i, int j);
void store_transposed(void* address, uint32_t a, uint32_t b);
void meet();
bool meet_and_vote(bool vote);
