// What statements of the kernel may use, beside its arguments: once barriers are initialised, and in its roles.
struct Consumer {
  const Params& params;
  SharedStorage& shared;
  const int warpgroup;
  void run();
};

// Varlen tiles, which all threads count.
struct TileFinder {
  const Params& params;
  template <class Counted> void count_all(Counted* counted);
};

// Warps beside the consumers: one loads; others draw tiles, write scales or transpose V.
void produce(const Params& params, SharedStorage& shared);
void schedule_tiles(const Params& params, SharedStorage& shared);
void produce_scales(const Params& params, SharedStorage& shared);
void produce_transposed_v(const Params& params, SharedStorage& shared);

void wait_for_launch_before();
void let_next_launch_begin();

extern const Params params;
extern SharedStorage shared;
