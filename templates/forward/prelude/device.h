// What texts of all roles may use, beside the head and sm90/: their interface. A test parses each behind it.

// Hardware barriers, from so many on: of a warpgroup's stores, of turns at the tensor cores, of all consumers.
constexpr int kStore = 1, kScheduler = 1, kAllConsumers = 1;

// Keys: what a row or a tile sees, of lengths, which are those of Params or of a sequence.
struct Lengths {
  int seqlen_q, seqlen_k, window_left, window_right;
  template <class Lengthy> Lengths(const Lengthy& lengthy);
};

struct Keys {
  int first, last;
};

Keys seen_by(const Lengths& lengths, int row);
Blocks blocks_of(const Lengths& lengths, int first_row, int last_row), blocks_of_tile(const Lengths& lengths, int m_block);
Blocks within(const Params& params, int split, Blocks blocks);

// Tiles of one warp: next gives those that see a key; varlen, look shows one that stays where it is until it is taken.
struct Tiles {
  SharedStorage& shared;
  uint32_t taken = 0;
  bool next(const Params& params, Tile& tile);
  const Tile& look(uint32_t ahead = 0) const;
  void take_together();
};

struct EmptyTiles {  // then those that see none
  explicit EmptyTiles(Tiles& tiles);
  bool next(const Params& params, Tile& tile);
};

// By their numbers: of all that are taken, in what order, and of a head; varlen, where a sequence lies.
Tile tile_at(const Params& params, int index), tile_of(const Params& params, int flat_head, int m_block);
int taker(), takers();  // thread blocks, or clusters
struct Order {
  int index;
  void advance();
};
struct Sequence sequence_of(const Params& params, int index);

// Scores: the two rows of a thread, and of its quad. A sum of P goes by chains.
template <int n> void find_largest(const float* s, float (&chains)[4]);
float quad_max(float x), quad_sum(float x), log2_approx(float x), reciprocal_approx(float x), tanh_approx(float x), sqrt_approx(float x);
using Chains = float[4];
template <int n> void exponentiate_group(const float* s, float* p, float factor, const float (&offset)[2], Chains& chains, bool first); template <int n, int terms> void exponentiate_curved(const float* s, float* p, const float (&curve)[terms], const float (&offset)[2], Chains& chains, bool first);
void add_to(Chains& chains, int i, float p, bool first);
float sum_of(const Chains& chains, int row);

// Values and output: products; V for one transposer; P and O in fewer bits; whether all that is stored is finite.
using Part = float[8];  // some columns of PV
template <bool accumulate> void wgmma_qk(float (&s)[kBlockN / 2], Descriptor q, Descriptor k);
template <bool accumulate, int n> void wgmma_pv(float (&o)[n], const uint32_t* p, Descriptor v);
uint32_t pack(float low, float high), pack(float a, float b, float c, float d);
template <int transposer> void produce_transposed_v(const Params& params, SharedStorage& shared);
void load_transposed(const void* address, uint32_t (&x)[4]), store_matrices(void* address, uint32_t a, uint32_t b, uint32_t c, uint32_t d);
void add_sink(float sink, float reference, float sum, float& inverse, float& lse);
template <int columns, int slab, int swizzle_bits, class OutElement, class Elements>
bool store_accumulator(OutElement* tile, Elements element);
