// ---- The order of tiles ----------------------------------------------------------------------

// Of how many steps a tile is, roughly: the longer, the lower.
__device__ __forceinline__ int class_of(int steps) {
  const int exponent = 31 - __clz(steps);
  return kRowThreads - 1 - (exponent < 3 ? steps : (exponent - 2) * 8 + (steps >> (exponent - 3)) % 8);
}

// The fewest steps of a tile of a class.
__device__ __forceinline__ int steps_of(int own_class) {
  const int rank = kRowThreads - 1 - own_class;
  return rank < 8 ? rank : (8 + rank % 8) << (rank / 8 - 1);
}

// In how many steps of a head there are rows that see keys from first_key on.
__device__ __forceinline__ int steps_from(const Sequence& sequence, int first_key) {
  const int first_row = first_row_past(sequence, first_key);
  return first_row < sequence.seqlen_q ? ceil_div(sequence.seqlen_q, kBlockM) - first_row / kBlockM : 0;
}

constexpr int kKeys = kCluster * kBlockN;  // of a listed tile
constexpr float kSumming = 3500, kSummedBytes = 1400;  // what a sum of parts of dK and dV takes, in clocks, and its bytes in one

// Lists tiles, by a thread block with a thread for each class.
struct TileLister {
  const Params& params;
  uint32_t (&places)[kRowThreads];  // how many tiles there are of a class, then where the next one goes
  uint32_t& kept;                   // parts of dK and dV, of a KV head
  int long_steps = 0;               // of all query heads of a tile, from which on longer tiles go before others
  int share_heads = params.group;   // of a group, where a sequence's tiles are shared out
  int most_steps = 1 << 30;         // of a head, of tiles that are not

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

  // How many there are of all tiles of a head, or so: from the first of a sequence to its last one they are ever fewer.
  __device__ __forceinline__ void count_steps(uint32_t& steps_of_all) const {
    uint32_t steps = 0;
    for_sequences([&](int, const Sequence& own, int tiles) {
      if (tiles > 0) {
        steps += tiles * (steps_from(own, 0) + steps_from(own, (tiles - 1) * kKeys)) / 2;
      }
    });
    atomicAdd(&steps_of_all, steps);
  }

  // Gives each tile a place among those of its class, in the order of its sequence's keys: counts how many there are of each, and
  // once `places` say from where each class begins, lists them.
  template <bool lists>
  __device__ __forceinline__ void place_tiles() {
    for_sequences([&](int index, const Sequence& own, int tiles) {
      const int most = steps_from(own, 0);
      const bool is_shared = share_heads < params.group && most > most_steps;
      const int own_heads = is_shared ? share_heads : params.group, shares = ceil_div(params.group, own_heads);
      const int own_kept = !is_shared ? -1 : lists ? int(atomicAdd(&kept, uint32_t(tiles * shares))) : 0;
      int behind = tiles * shares;  // of those up to this sequence
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
        const int rank = number - __shfl_sync(0xffffffff, behind - tiles * shares, owner);
        const int heads = __shfl_sync(0xffffffff, own_heads, owner), of_tile = ceil_div(params.group, heads);
        const int first_key = rank / of_tile * kKeys, first_head = rank % of_tile * heads;
        const int first_kept = __shfl_sync(0xffffffff, own_kept, owner), sequence_index = __shfl_sync(0xffffffff, index, owner);
        Sequence sequence;
        sequence.seqlen_q = __shfl_sync(0xffffffff, own.seqlen_q, owner);
        sequence.seqlen_k = __shfl_sync(0xffffffff, own.seqlen_k, owner);
        // tiles of a sequence follow each other, which share its rows in the L2 cache, but for long ones
        const int of_first = __shfl_sync(0xffffffff, most, owner) * heads, steps = heads * steps_from(sequence, first_key);
        const int own_class = class_of(steps > long_steps ? steps : min(of_first, long_steps));
        const bool is_one = number < count;
        // neighbours of one sequence and class take their places together
        const int before_owner = __shfl_up_sync(0xffffffff, owner, 1), before_class = __shfl_up_sync(0xffffffff, own_class, 1);
        const bool begins = lane() == 0 || !is_one || owner != before_owner || own_class != before_class;
        const uint32_t begun = __ballot_sync(0xffffffff, begins), up_to = 0xffffffff >> (31 - lane());
        const int leader = 31 - __clz(begun & up_to), next = __ffs(begun & ~up_to);
        uint32_t place = 0;
        if (begins && is_one) {
          place = atomicAdd(&places[own_class], uint32_t((next > 0 ? next - 1 : 32) - lane()));
        }
        place = __shfl_sync(0xffffffff, place, leader) + lane() - leader;
        if (lists && is_one) {
          const int left = min(heads, params.group - first_head);
          Sequence whole = sequence_of(params, sequence_index);
          whole.kept = first_kept < 0 ? -1 : first_kept + rank;
          params.listed[place] = {whole, first_key, uint16_t(first_head), uint16_t(left)};
        }
      }
    });
  }

  // Shares the groups of long sequences out where a tile of theirs takes long beside an even part of all work: in two or four, if
  // there is room for what is kept, and if that is sooner than to leave them whole.
  __device__ __forceinline__ void share_out(uint32_t steps_of_all, uint32_t& long_tiles, uint32_t& longest) {
    const float even = float(steps_of_all) * params.kv_heads / kMachines;  // steps of a head
    most_steps = max(1, int(0.6f * even));
    uint32_t own_tiles = 0, own_longest = 0;
    for_sequences([&](int, const Sequence& own, int tiles) {
      const int first = tiles > 0 ? steps_from(own, 0) : 0;
      if (first > most_steps) {
        own_tiles += tiles;
        own_longest = max(own_longest, uint32_t(first));
      }
    });
    atomicAdd(&long_tiles, own_tiles);
    atomicMax(&longest, own_longest);
    __syncthreads();
    float least = INFINITY;
#pragma unroll 1
    for (int shares = 1; shares <= 4; shares *= 2) {
      const int heads = ceil_div(params.group, shares), parts = ceil_div(params.group, heads) * long_tiles;
      const float summing = shares > 1 ? kSumming + 2.f * sizeof(KeyBlock) / kSummedBytes * parts * params.kv_heads * kCluster : 0.f;
      const float clocks = max(float(heads) * longest, even * params.group) * kStepClocks + summing;
      if (clocks < least && (shares == 1 || parts <= params.most_kept)) {
        least = clocks;
        share_heads = heads;
      }
    }
  }
};

// By one of the thread blocks that prepare rows.
__device__ __forceinline__ void list_tiles(const Params& params) {
  __shared__ uint32_t places[kRowThreads], kept, steps_of_all, long_tiles, longest;
  places[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    kept = steps_of_all = long_tiles = longest = 0;
  }
  __syncthreads();
  TileLister lister{params, places, kept};
  lister.count_steps(steps_of_all);
  __syncthreads();
  const float even = float(steps_of_all) * params.group / kMachines;  // what each has to do of a KV head
  lister.long_steps = int(even * params.kv_heads / 4);
  if (params.most_kept > 0) {
    lister.share_out(steps_of_all, long_tiles, longest);
  }
  lister.place_tiles<false>();
  __syncthreads();
  const uint32_t own = places[threadIdx.x];
#pragma unroll 1
  for (int step = 1; step < kRowThreads; step *= 2) {
    const uint32_t before = int(threadIdx.x) >= step ? places[threadIdx.x - step] : 0;
    __syncthreads();
    places[threadIdx.x] += before;
    __syncthreads();
  }
  const int tiles = places[kRowThreads - 1], begin = places[threadIdx.x] - own;
  const bool fit = tiles <= params.most_tiles;  // not where offsets fall: then there are none, since tiles wait for each other
  __syncthreads();
  places[threadIdx.x] = begin;
  if (threadIdx.x == 0 && (!fit || tiles == 0)) {
    *params.list = {};
  } else if (fit && own > 0 && begin == 0) {  // those of the most steps
    // two of their length for each SM, and tiles for two rounds and a half
    const int rounds = ceil_div(5 * kMachines / 2, tiles);
    *params.list = {tiles, max(rounds, int(min(1e6f, 2.f * steps_of(threadIdx.x) / max(1.f, even))) + 1)};
  }
  __syncthreads();
  if (fit) {
    lister.place_tiles<true>();
  }
}
