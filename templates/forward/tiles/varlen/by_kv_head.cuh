  // In a class tiles go sequence by sequence and KV head by KV head: who shares K and V loads them at the same time.

  // Counts all tiles, by all threads: a warp would take long for very many sequences.
  __device__ __forceinline__ void count_all(Counted* counted) {
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));  // else all roles would keep lane() from here on
    for (int index = thread; index < params.batch + kAround; index += kThreads) {
      count(index);
    }
    add_up();
    if (thread % 32 == 0) {
      counted[thread / 32] = {classes, tiles};
    }
  }

  // Takes what all warps have counted, and looks at the first tiles.
  __device__ __forceinline__ void begin_with_longest(const Counted* counted) {
    if (lane() < kThreads / 32) {
      classes = counted[lane()].classes;
      tiles = counted[lane()].tiles;
    }
    add_up();
    own_class = highest_class(classes);
    look();
  }

  __device__ __forceinline__ int heads_at_hand() const { return params.heads; }

  // Looks at the sequences from `first` on.
  __device__ __forceinline__ void look() {
    find_range();
    count_up_to(params.heads);
  }

  __device__ __forceinline__ void next_class() { own_class = highest_class(classes & ((1u << own_class) - 1)); }

  // The head of a rank among the tiles of this lane's sequence and this class, and its row, counted from the last.
  __device__ __forceinline__ void find_row(int rank, int& head, int& kv_head, int& row) const {
    const int group = params.heads_per_kv_head.value;
    kv_head = rank / (group * (end - begin));
    rank -= kv_head * group * (end - begin);
    row = params.heads_per_kv_head.divide(rank);
    head = kv_head * group + rank - row * group;
  }
