// What statements of the kernel may use, beside its arguments: all threads run them, once barriers are initialised.
struct Producer {
  const Params& params;
  SharedStorage& shared;

  void prefetch_first();
  void run();
  void run(bool again);  // by a fixed maximum
};

struct Consumer {
  const Params& params;
  SharedStorage& shared;
  bool exact, failed;  // of a fixed maximum

  void run();
  void run(bool again);
};

void wait_for_launch_before();
void let_next_launch_begin();

extern const Params params;
extern SharedStorage shared;
extern const int warp;
