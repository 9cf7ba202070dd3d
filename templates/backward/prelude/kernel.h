// What statements of the kernel may use, beside its arguments: at its entry, once barriers are initialised, in its roles, and at
// its end. Those of the entry, or of the kernel, give the roles a tile, unless these draw tiles.
struct Loader {
  const Params& params;
  SharedStorage& shared;
  void run(const Tile& tile), run();
};

struct Rounder {  // of sums of dQ, meanwhile
  const Params& params;
  SharedStorage& shared;
  void run();
};

// Adds dQ up, by a thread of each of two warps.
void add_dq(const Params& params, SharedStorage& shared, const Tile& tile, int adder);
void add_dq(const Params& params, SharedStorage& shared, int adder);

template <bool computes_dq = true>
struct Consumer {
  const Params& params;
  SharedStorage& shared;
  const int warpgroup;
  void run(const Tile& tile), run(), run_dv(const Tile& tile), run_dk(const Tile& tile);
};

struct Sequence sequence_of(const Params& params, int batch);  // dense, whose masks differ
void wait_for_launch_before();  // which prepared rows, and lists tiles of varlen sequences

extern const Params params;
extern SharedStorage shared;
extern const Tile tile, found;  // as found at the entry, of varlen sequences
extern const int warpgroup;  // the first is the producer
