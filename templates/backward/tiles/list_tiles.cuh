constexpr int kKeys = kCluster * kBlockN;  // of a listed tile
constexpr int kForms = 3;                  // a group is whole, or shared out in two or four
constexpr float kSumming = 3500, kSummedBytes = 1400;  // what a sum of parts of dK and dV takes, in clocks, and its bytes in one

// What list_tiles goes by.
struct TileCounts {
  uint32_t places[kForms][kRowThreads];  // how many tiles there are of a class and all before it, then where its next one goes
  uint32_t parts[kForms];                // of dK and dV, of a KV head
  uint32_t longest[kForms];              // steps of the multiprocessor that has the most, at least
  uint32_t steps, kept;
};

// Lists tiles, by a thread block with a thread for each class.
struct TileLister {
  const Params& params;
  TileCounts& counts;
  int long_steps = 0;  // of all query heads of a tile, from which on longer tiles go before others
  int most_steps = 0;  // of a head, of sequences whose groups are not shared out

  // Goes through sequences: a warp has some at a time, a lane one of them.
  template <class Visit>
  __device__ __forceinline__ void for_sequences(const Visit& visit) const {
    const int sequences = params.offsets + 1, width = min(32, ceil_div(sequences, kRowThreads / 32));
    for (int first = threadIdx.x / 32 * width; first < sequences; first += kRowThreads / 32 * width) {
      const int index = min(first + lane(), params.offsets);
      const Sequence own = sequence_of(params, index);
      visit(index, own, lane() < width && first + lane() < sequences ? ceil_div(own.held_k, kKeys) : 0);
    }
  }

  // How many steps there are of all tiles of a head, or so: from the first of a sequence to its last one they are ever fewer.
  __device__ __forceinline__ void count_steps() const {
    uint32_t steps = 0;
    for_sequences([&](int, const Sequence& own, int tiles) {
      if (tiles > 0) {
        steps += tiles * (steps_from(own, 0) + steps_from(own, (tiles - 1) * kKeys)) / 2;
      }
    });
    atomicAdd(&counts.steps, steps);
  }

  // Goes through the tiles of a KV head, in the order of a sequence's keys: a lane has one of any of its warp's sequences.
  template <class Visit>
  __device__ __forceinline__ void for_tiles(const Visit& visit) const {
    for_sequences([&](int index, const Sequence& own, int tiles) {
      const int most = steps_from(own, 0);
      int behind = tiles;  // of those up to this sequence
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(0xffffffff, behind, step);
        behind += lane() >= step ? before : 0;
      }
      const int count = __shfl_sync(0xffffffff, behind, 31);
      for (int number = lane(); number - lane() < count; number += 32) {
        int owner = 0;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
          owner += number >= __shfl_sync(0xffffffff, behind, owner + step - 1) ? step : 0;
        }
        const int first_key = (number - __shfl_sync(0xffffffff, behind - tiles, owner)) * kKeys;
        Sequence sequence;
        sequence.seqlen_q = __shfl_sync(0xffffffff, own.seqlen_q, owner);
        sequence.seqlen_k = __shfl_sync(0xffffffff, own.seqlen_k, owner);
        const int of_first = __shfl_sync(0xffffffff, most, owner);
        visit(number < count, __shfl_sync(0xffffffff, index, owner), first_key, of_first, steps_from(sequence, first_key));
      }
    });
  }

  // Query heads of a tile whose sequence's first one has so many steps.
  __device__ __forceinline__ int heads_of(int form, int of_first) const {
    return of_first > most_steps ? ceil_div(params.group, 1 << form) : params.group;
  }

  // Tiles of a sequence follow each other, which share its rows in the L2 cache, but for long ones.
  __device__ __forceinline__ int class_for(int heads, int of_first, int steps) const {
    return class_of(heads * steps > long_steps ? heads * steps : min(heads * of_first, long_steps));
  }

  __device__ __forceinline__ void count_tiles(int forms) {
    for_tiles([&](bool is_one, int, int, int of_first, int steps) {
      for (int form = 0; form < forms; ++form) {
        const int heads = heads_of(form, of_first), shares = ceil_div(params.group, heads);
        if (is_one) {
          atomicAdd(&counts.places[form][class_for(heads, of_first, steps)], uint32_t(shares));
        }
        if (is_one && shares > 1) {
          atomicAdd(&counts.parts[form], uint32_t(shares));
        }
      }
    });
  }

  // Of each class also those before it; some multiprocessor has two of the longest tiles, if there is one more of them than
  // multiprocessors.
  __device__ __forceinline__ void add_up(int form) {
    uint32_t* const places = counts.places[form];
#pragma unroll 1
    for (int step = 1; step < kRowThreads; step *= 2) {
      const uint32_t before = int(threadIdx.x) >= step ? places[threadIdx.x - step] : 0;
      __syncthreads();
      places[threadIdx.x] += before;
      __syncthreads();
    }
    const int rounds = ceil_div(int(places[threadIdx.x]) * params.kv_heads, kMachines);
    atomicMax(&counts.longest[form], uint32_t(steps_of(threadIdx.x) * rounds));
  }

  // In how many shares groups end the soonest, as a power of two; `even` is what each multiprocessor has to do. It must be worth a
  // twentieth, and there must be room for what is kept.
  __device__ __forceinline__ int best_form(int forms, float even) const {
    int best = 0;
    float least = INFINITY;
    for (int form = 0; form < forms; ++form) {
      const int parts = counts.parts[form];
      const float summing = parts > 0 ? kSumming + 2.f * sizeof(KeyBlock) / kSummedBytes * parts * params.kv_heads * kCluster : 0.f;
      const float clocks = max(float(counts.longest[form]), even) * kStepClocks + summing;
      if (clocks < 0.95f * least && parts <= params.most_kept) {
        least = clocks;
        best = form;
      }
    }
    return best;
  }

  // Once places say where each class begins.
  __device__ __forceinline__ void list(int form) {
    for_tiles([&](bool is_one, int sequence, int first_key, int of_first, int steps) {
      const int heads = heads_of(form, of_first), shares = ceil_div(params.group, heads), own = class_for(heads, of_first, steps);
      // neighbours of one sequence and class take their places together
      const int before_sequence = __shfl_up_sync(0xffffffff, sequence, 1), before = __shfl_up_sync(0xffffffff, own, 1);
      const bool begins = lane() == 0 || !is_one || sequence != before_sequence || own != before;
      const uint32_t begun = __ballot_sync(0xffffffff, begins), up_to = 0xffffffff >> (31 - lane());
      const int leader = 31 - __clz(begun & up_to), next = __ffs(begun & ~up_to);
      uint32_t place = 0, kept = 0;
      if (begins && is_one) {
        const uint32_t together = ((next > 0 ? next - 1 : 32) - lane()) * shares;
        place = atomicAdd(&counts.places[form][own], together);
        kept = shares > 1 ? atomicAdd(&counts.kept, together) : 0;
      }
      place = __shfl_sync(0xffffffff, place, leader) + (lane() - leader) * shares;
      kept = __shfl_sync(0xffffffff, kept, leader) + (lane() - leader) * shares;
      Sequence own_sequence = sequence_of(params, sequence);
      for (int share = 0; share < shares && is_one; ++share) {
        const int first_head = share * heads, left = min(heads, params.group - first_head);
        own_sequence.kept = shares > 1 ? int(kept) + share : -1;
        params.listed[place + share] = {own_sequence, first_key, uint16_t(first_head), uint16_t(left)};
      }
    });
  }
};

// By one of the thread blocks that prepare rows.
__device__ __forceinline__ void list_tiles(const Params& params) {
  __shared__ TileCounts counts;
  for (int i = threadIdx.x; i < int(sizeof(counts) / sizeof(uint32_t)); i += kRowThreads) {
    reinterpret_cast<uint32_t*>(&counts)[i] = 0;
  }
  __syncthreads();
  TileLister lister{params, counts};
  lister.count_steps();
  __syncthreads();
  const float even = float(counts.steps) * params.group * params.kv_heads / kMachines;  // what each has to do
  const int forms = params.most_kept > 0 ? kForms : 1;
  lister.long_steps = int(even / 4);
  lister.most_steps = max(1, int(0.3f * even / params.group));
  lister.count_tiles(forms);
  __syncthreads();
  for (int form = 0; form < forms; ++form) {
    lister.add_up(form);
  }
  __syncthreads();
  const int form = lister.best_form(forms, even);
  uint32_t* const places = counts.places[form];
  const int tiles = places[kRowThreads - 1], begin = threadIdx.x > 0 ? places[threadIdx.x - 1] : 0;
  const bool some = int(places[threadIdx.x]) > begin;
  const bool fit = tiles <= params.most_tiles;  // not where offsets fall: then there are none, since tiles wait for each other
  __syncthreads();
  places[threadIdx.x] = begin;
  if (threadIdx.x == 0 && (!fit || tiles == 0)) {
    *params.list = {};
  } else if (fit && some && begin == 0) {  // those of the most steps
    // heads of a last section: work for two of these at least, and tiles for two rounds and a half
    const int rounds = ceil_div(5 * kMachines / 2, tiles);
    const float longest = 2.f * params.kv_heads * steps_of(threadIdx.x) / max(1.f, even);
    *params.list = {tiles, max(rounds, int(min(1e6f, longest)) + 1)};
  }
  __syncthreads();
  if (fit) {
    lister.list(form);
  }
}
