  // The highest class first: but so K and V come from memory for each class that a head has tiles of. Where the L2 cache does
  // not hold them, only as many of the last heads as fill up behind all others are therefore in this order, in a class
  // sequence by sequence the longest first. The first heads are before them: there all tiles of a sequence are in the class of
  // its longest, and go KV head by KV head, since who shares K and V loads them at the same time.
  int first_heads;  // that come before the others; 0: none, or none any more
  bool whole;       // whether these are at hand
  int heads;        // at hand

  __device__ __forceinline__ int steps_of(int m_block) const {
    const Blocks blocks = blocks_of_tile(sequence, m_block);
    return max(0, blocks.last - blocks.first);
  }

  int longest = 0;  // steps of a tile
  float steps = 0;  // of a head's tiles, whose first and last are taken for the average

  // Adds up what lanes have counted.
  __device__ __forceinline__ void add_up_steps() {
    add_up();
    longest = __reduce_max_sync(0xffffffff, longest);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      steps += __shfl_xor_sync(0xffffffff, steps, distance);
    }
  }

  // Counts all tiles, by all threads: a warp would take long for very many sequences.
  __device__ __forceinline__ void count_all(Counted* counted) {
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));  // else all roles would keep lane() from here on
    for (int index = thread; index < params.batch + kAround; index += kThreads) {
      if (const int rows = count(index); rows > 0) {
        longest = max(longest, steps_of(rows - 1));
        steps += 0.5f * rows * (steps_of(0) + steps_of(rows - 1));
      }
    }
    add_up_steps();
    if (thread % 32 == 0) {
      counted[thread / 32] = {classes, tiles, longest, steps};
    }
  }

  // Takes what all warps have counted, and looks at the first tiles.
  __device__ __forceinline__ void begin_with_longest(const Counted* counted) {
    if (lane() < kThreads / 32) {
      const Counted own = counted[lane()];
      classes = own.classes, tiles = own.tiles, longest = own.longest, steps = own.steps;
    }
    add_up_steps();
    own_class = highest_class(classes);
    // Behind them one KV head fills up, and half as much again as all thread blocks take for their longest tile. Heads of
    // a tile or two share little.
    const int group = params.heads_per_kv_head.value;
    const int filling_up = 1 + int(1.5f * __fdividef(float(gridDim.x) * longest, steps * group));
    const bool pays = params.exceeds_l2 && longest * kBlockN > 2 * kBlockM;
    first_heads = pays ? max(0, params.heads - filling_up * group) : 0;
    whole = first_heads > 0;
    heads = whole ? first_heads : params.heads;
    look();
  }

  __device__ __forceinline__ int heads_at_hand() const { return heads; }

  // Looks at the sequences from `first` on.
  __device__ __forceinline__ void look() {
    find_range();
    if (whole && begin < end) {
      begin = end == tiles_of_head() ? first_with(1) : end;
    }
    count_up_to(heads);
  }

  __device__ __forceinline__ void next_class() {
    own_class = highest_class(classes & ((1u << own_class) - 1));
    if (own_class == 0) {  // the end of this order, but for tiles without keys, of all heads
      own_class = whole ? highest_class(classes) : 0;
      first_heads = whole ? first_heads : 0;
      heads = params.heads - first_heads;
      whole = false;
    }
  }

  // The head of a rank among the tiles of this lane's sequence and this class, and its row, counted from the last. Of very
  // short tiles a division would be seen: heads of one need none.
  __device__ __forceinline__ void find_row(int rank, int& head, int& kv_head, int& row) const {
    const int group = params.heads_per_kv_head.value, rows = end - begin;
    const bool by_kv_head = whole || first_heads == 0;
    row = 0;
    head = rank;
    if (rows > 1 && by_kv_head) {
      const int own = rank / (group * rows);
      rank -= own * group * rows;
      row = params.heads_per_kv_head.divide(rank);
      head = own * group + rank - row * group;
    } else if (rows > 1) {  // the longest of all heads that fill up
      row = rank / heads;
      head = rank - row * heads;
    }
    head += whole ? 0 : first_heads;
    kv_head = params.heads_per_kv_head.divide(head);
  }
