// fwd_bf16_d128_causal_m128n128_varlen_packgqa: fused attention forward for Hopper (sm_90a).
// Rendered by fagen; do not edit.
//
//   out = softmax(scale * q kᵀ) v,   lse = log(sum(exp(scale * q kᵀ)))
//
// One thread block computes a tile of 128 query rows of one head, 128 keys at a time from the last
// to the first, by online softmax in base 2. One producer warp copies Q, K and V into shared memory
// by TMA; 2 consumer warpgroups of 64 rows each multiply by WGMMA. They do so in ping-pong: they
// take turns at the tensor cores. Heads that share K and V share tiles, as if they were one: their
// rows of a query lie side by side. Sequences lie one after another, each of its own length: one
// warp finds out where, and deals tiles.
//
// Needs fagen_host.h, which lies beside it, the headers below, and
// -gencode=arch=compute_90a,code=sm_90a.

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

namespace fagen_fwd_bf16_d128_causal_m128n128_varlen_packgqa_kernel {

// ---- The schedule ----------------------------------------------------------------------------

using Element = __nv_bfloat16;
constexpr int kHeadDim = 128;
constexpr int kHeadDimV = 128;
constexpr int kHeadDimPadded = 128;  // in shared memory, padded with zeros
constexpr int kHeadDimVPadded = 128;
constexpr int kBlockM = 128;
constexpr int kBlockN = 128;
constexpr int kStages = 2;  // K and V buffers
constexpr int kQStages = 1;
constexpr int kConsumers = 2;  // warpgroups of 64 query rows
constexpr int kThreads = 384;
constexpr int kLaunchRegisters = 168;
constexpr int kStepK = 16;   // the K of every wgmma
constexpr int kQkSlab = 64;  // columns of a slab: one swizzle span, all rows of a slab together
constexpr auto kQkDescriptor = cute::SM90::GMMA::LayoutType::B128;

constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;

constexpr int64_t kL2Bytes = 52428800;

constexpr int kTileStages = 6;   // tiles drawn and not yet done
constexpr int kTileReaders = 9;  // warps that ask for them
// Blocks before its end that a tile's successor is drawn: enough to hide the answer's way.
constexpr int kDrawAhead = 2;

constexpr int kUnrolledCopies = 8;  // that a thread issues without a loop

constexpr int kVSlab = 64;
constexpr auto kVDescriptor = cute::SM90::GMMA::LayoutType::B128;

constexpr float kNoScore = -1e+30f;  // where row maxima start: finite, so that no exponent is NaN
constexpr float kFar =
    16777216.0f;  // exponents of 2 from here on are too coarse to be taken as they are

constexpr float kMaxPartialSum = 4096.0f;  // of a lane's P; more updates the maximum

// After a tile's first that find their maxima before P, if scores are widely spread.
constexpr int kSpreadBlocks = 4;
constexpr float kSpreadSum =
    1.25f;  // of a thread's P in its two rows: in so many threads of a warp less
constexpr int kSpreadKeys = 16;  // with fewer in its rows a warp's small sums tell nothing
constexpr int kSpreadThreads = 20;
constexpr int kSpreadWarps = 3;   // of a warpgroup, at least
constexpr int kSpreadSeeing = 2;  // warps of it that see so many keys, at least

constexpr int kOutputColumns = 128;

using OutElement = __nv_bfloat16;
constexpr int kOSlab = 64;
constexpr int kOSwizzleBits = 3;

constexpr int kMostUnused = 4;  // rows of a warpgroup, which has whole queries of a group

constexpr int kWarpgroup = 128;
constexpr int kWarpgroupRows = 64;  // the M of every wgmma

using Output = float[kOutputColumns / 2];  // a thread's part of a warpgroup's O

using Barrier = cutlass::arch::ClusterBarrier;
using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

template <class Integer>
__host__ __device__ constexpr Integer ceil_div(Integer a, Integer b) {
  return (a + b - 1) / b;
}

// n / value for 0 <= n < 2^31 by a multiplication: every thread waits for its coordinates.
// With 2^(bits - 1) < value <= 2^bits, rounding 2^(31 + bits) / value up is exact enough (Granlund
// and Montgomery, "Division by Invariant Integers using Multiplication", 1994).
struct FastDivisor {
  int value;
  uint32_t multiplier;  // 0: value is 1
  int shift;

  __host__ explicit FastDivisor(int divisor = 1) : value(divisor), multiplier(0), shift(0) {
    if (divisor > 1) {
      while ((int64_t(2) << shift) < divisor) {
        ++shift;
      }
      multiplier = uint32_t(((uint64_t(1) << (32 + shift)) + divisor - 1) / divisor);
    }
  }

  __device__ __forceinline__ int divide(int n) const {
    return multiplier ? int(__umulhi(n, multiplier) >> shift) : n;
  }
};

// Blocks first … last - 1 of kBlockN keys, visited from the last to the first.
struct Blocks {
  int first;
  int full_last;  // from here on some row does not see all keys
  int last;
};

enum : int { kRagged = 1 << 30 };  // rows of a tensor map, where every sequence ends
enum : int {
  kAround = 2
};  // sequences that rows of no sequence are taken for: those behind all others, and before

// One of the sequences that lie one after another: how many rows it has, and behind which it ends.
struct Sequence {
  int seqlen_q, seqlen_k, end_q, end_k;
};

// kBlockM query rows of one head, and the keys they see.
struct alignas(16) Tile {
  int first_row, head, kv_head;
  Sequence sequence;
  int warpgroups, first_warpgroup;  // how many have rows, and which one the first 64
  Blocks blocks;                    // last < first: no tile
};

// What a warp has counted of all sequences, and of a head's tiles the steps of the longest, and of
// all of them.
struct Counted {
  uint32_t classes;
  int tiles, longest;
  float steps;
};

struct SharedStorage {
  alignas(1024) Element q[kQStages][kBlockM * kHeadDimPadded];
  alignas(1024) Element k[kStages][kBlockN * kHeadDimPadded];
  alignas(1024) Element v[kStages][kBlockN * kHeadDimVPadded];
  alignas(1024) OutElement o[kBlockM * kHeadDimVPadded];
  alignas(1024) TransactionBarrier q_full[kQStages][kConsumers];
  uint8_t votes[kConsumers][4];  // of warps
  TransactionBarrier k_full[kStages];
  TransactionBarrier v_full[kStages];
  Barrier q_empty[kQStages][kConsumers];
  Barrier k_empty[kStages];
  Barrier v_empty[kStages];
  Barrier tile_full[kTileStages];
  Barrier tile_empty[kTileStages];
  union {                              // the second first
    Tile tiles[kTileStages];           // in work, and next
    Counted counted[kTileStages * 4];  // by warps
  };
  Barrier tile_wanted;
};
constexpr int kSharedBytes = sizeof(SharedStorage);
static_assert(kSharedBytes <= 197632, "the layout outgrew the plan's ledger");

struct Params {
  CUtensorMap q, k, v, out;
  float* lse;  // may be null
  int64_t lse_stride_head;
  const int32_t* cu_seqlens_q;  // where sequences begin, and the last one ends
  const int32_t* cu_seqlens_k;  // the same of keys
  const int32_t* seqused_k;     // of how many keys each is to see the first ones; null: of all
  int batch, total_q, total_k;
  int heads;        // each of those that share a tile's rows
  bool exceeds_l2;  // K and V do
  FastDivisor heads_per_kv_head;
  uint32_t* tiles_drawn;     // beyond the first of each block
  float scale_log2;          // scale * log2(e)
  FastDivisor pack;          // heads that share a tile's rows
  int queries;               // that a warpgroup has rows of
  FastDivisor tile_queries;  // and a tile
};

// ---- Tiles -----------------------------------------------------------------------------------

__device__ __forceinline__ int lane() {
  return threadIdx.x % 32;
}

// A stage of a ring of buffers, and the phase of its barriers, which flips each time around.
template <int stages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    stage += 1;
    if (stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Hardware barriers, by number; 0 is __syncthreads.
constexpr int kStore = 1;  // and up: each of one warpgroup

using Lengths = Sequence;  // seqlen_q and seqlen_k

// The keys first … last - 1 that a row sees; none where last <= first. Both ends rise from row to
// row.
struct Keys {
  int first, last;
};

__host__ __device__ __forceinline__ Keys seen_by(const Lengths& lengths, int row) {
  const int seqlen_q = lengths.seqlen_q, seqlen_k = lengths.seqlen_k;
  return {0, min(seqlen_k, row + seqlen_k - seqlen_q + 1)};
}

// What the rows first_row … last_row see.
__host__ __device__ __forceinline__ Blocks blocks_of(const Lengths& lengths, int first_row,
                                                     int last_row) {
  const Keys top = seen_by(lengths, first_row), bottom = seen_by(lengths, last_row);
  return {0, max(0, top.last) / kBlockN, ceil_div(max(0, bottom.last), kBlockN)};
}

// Where a sequence lies. Whatever the lengths say, that is within the tensors. The rows behind all
// sequences, and those before them, are two more, which see no key.
__device__ __forceinline__ Sequence sequence_of(const Params& params, int index) {
  Sequence sequence = {};
  if (index < params.batch) {
    sequence.end_q = min(max(0, __ldg(params.cu_seqlens_q + index + 1)), params.total_q);
    sequence.seqlen_q = max(0, sequence.end_q - max(0, __ldg(params.cu_seqlens_q + index)));
    const int first_key = max(0, __ldg(params.cu_seqlens_k + index));
    sequence.seqlen_k =
        max(0, min(max(0, __ldg(params.cu_seqlens_k + index + 1)), params.total_k) - first_key);
    if (params.seqused_k) {
      sequence.seqlen_k = min(sequence.seqlen_k, max(0, __ldg(params.seqused_k + index)));
    }
    sequence.end_k = first_key + sequence.seqlen_k;
  } else if (index < params.batch + kAround) {
    const bool behind = index == params.batch;
    const int offset =
        params.cu_seqlens_q ? max(0, __ldg(params.cu_seqlens_q + (behind ? params.batch : 0))) : 0;
    sequence.end_q = behind ? params.total_q : min(offset, params.total_q);
    sequence.seqlen_q = behind ? max(0, params.total_q - offset) : sequence.end_q;
  }
  return sequence;
}

// Makes tiles of their numbers. Where sequences begin and end the GPU alone knows, so a warp looks
// at them, 32 at a time, each lane at one.
//
// Tiles are numbered class by class. Those of class c see 2^(c - 1) … 2^c - 1 blocks of keys, and
// those of class 0 none: the highest class comes first, so that short tiles fill up behind the long
// ones.
struct TileFinder {
  const Params& params;
  uint32_t classes = 0;  // bit c: that there may be tiles of class c
  int tiles = 0;         // of all classes
  int own_class;         // at hand
  int first = 0;         // of the 32 sequences at hand
  int before = 0;        // tiles of the classes, and sequences of this class, before these
  Sequence sequence;     // this lane's
  int begin, end;        // its tiles of a head in this class
  int up_to;             // tiles of the sequences at hand up to this lane's

  __device__ __forceinline__ int class_of(int m_block) const {
    return 32 - __clz(blocks_of_tile(sequence, m_block).last);
  }

  __device__ __forceinline__ static int highest_class(uint32_t of) {
    return max(0, 31 - __clz(of));
  }

  // Counts the tiles of a sequence, and answers how many a head has.
  __device__ __forceinline__ int count(int index) {
    sequence = sequence_of(params, index);
    const int count = tiles_of_head();
    if (count > 0) {
      tiles += count * params.heads;
      classes |= (2u << class_of(count - 1)) - (1u << class_of(0));
    }
    return count;
  }

  // Adds up what lanes have counted.
  __device__ __forceinline__ void add_up() {
    tiles = __reduce_add_sync(0xffffffff, tiles);
    classes = __reduce_or_sync(0xffffffff, classes);
  }

  // Of the 32 sequences from `first` on, a head's tiles in this class.
  __device__ __forceinline__ void find_range() {
    sequence = sequence_of(params, first + lane());
    begin = own_class > 0 ? first_with(1 << (own_class - 1)) : 0;
    end = first_with(1 << own_class);
  }

  // Of so many heads.
  __device__ __forceinline__ void count_up_to(int heads) {
    up_to = (end - begin) * heads;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int others = __shfl_up_sync(0xffffffff, up_to, distance);
      up_to += lane() >= distance ? others : 0;
    }
  }

  // Of the heads that share tiles, as if they were one.
  __device__ __forceinline__ int tiles_of_head() const {
    return params.tile_queries.divide(sequence.seqlen_q + params.tile_queries.value - 1);
  }

  __device__ __forceinline__ int first_row_of(int m_block) const {
    return m_block * params.tile_queries.value;
  }

  __device__ __forceinline__ Blocks blocks_of_tile(const Sequence& lengths, int m_block) const {
    const int first_row = first_row_of(m_block);
    return blocks_of(lengths, first_row, first_row + params.tile_queries.value - 1);
  }

  // How many warpgroups have rows of a tile: counted, since a division would be seen of very short
  // tiles.
  __device__ __forceinline__ int warpgroups_from(int first_row) const {
    const int left = sequence.seqlen_q - first_row;
    int warpgroups = 1;
#pragma unroll
    for (int i = 1; i < kConsumers; ++i) {
      warpgroups += left > i * params.queries;
    }
    return warpgroups;
  }

  // The first tile of a head that sees so many blocks.
  __device__ __forceinline__ int first_with(int least) const {
    int low = 0, high = tiles_of_head();
    while (low < high) {
      const int m_block = (low + high) / 2;
      if (blocks_of_tile(sequence, m_block).last < least) {
        low = m_block + 1;
      } else {
        high = m_block;
      }
    }
    return low;
  }

  // The highest class first: but so K and V come from memory for each class that a head has tiles
  // of. Where the L2 cache does not hold them, only as many of the last heads as fill up behind all
  // others are therefore in this order, in a class sequence by sequence the longest first. The
  // first heads are before them: there all tiles of a sequence are in the class of its longest, and
  // go KV head by KV head, since who shares K and V loads them at the same time.
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
    // Behind them one KV head fills up, and half as much again as all thread blocks take for their
    // longest tile. Heads of a tile or two share little.
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

  // The head of a rank among the tiles of this lane's sequence and this class, and its row, counted
  // from the last. Of very short tiles a division would be seen: heads of one need none.
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

  // Writes the tile of this number, which rises from call to call; one past the last is no tile,
  // and the answer false.
  __device__ __forceinline__ bool find(int number, Tile& found) {
    if (number >= tiles) {
      if (lane() == 0) {
        found = {};
        found.blocks.last = -1;
      }
      return false;
    }
    for (int at_hand; number - before >= (at_hand = __shfl_sync(0xffffffff, up_to, 31)); look()) {
      before += at_hand;
      first += 32;
      if (first >= params.batch + (own_class > 0 ? 0 : kAround)) {
        first = 0;
        next_class();
      }
    }
    const int rank = number - before;
    if (lane() == __ffs(__ballot_sync(0xffffffff, rank < up_to)) - 1) {
      found = tile_of(rank - up_to + (end - begin) * heads_at_hand());
    }
    return true;
  }

  // The tile of this rank among those of this lane's sequence and this class.
  __device__ __forceinline__ Tile tile_of(int rank) const {
    Tile tile;
    tile.sequence = sequence;
    int row;
    find_row(rank, tile.head, tile.kv_head, row);
    const int m_block = end - 1 - row;
    tile.first_row = first_row_of(m_block);
    tile.blocks = blocks_of_tile(sequence, m_block);
    tile.warpgroups = warpgroups_from(tile.first_row);
    return tile;
  }
};

// Warpgroups take 64 rows each in turns, from tile to tile: where a tile has rows for some of them,
// the others go on to the next one.
struct TileRing {
  int turn = 0;  // whose it is

  __device__ __forceinline__ void pass_on(SharedStorage& shared, uint32_t stage) {
    Tile& tile = shared.tiles[stage];
    tile.first_warpgroup = turn;
    turn = (turn + tile.warpgroups) % kConsumers;
    shared.tile_full[stage].arrive();
  }
};

// The tiles that are passed on, for one of the other warps: first those that see a key.
struct Tiles {
  SharedStorage& shared;
  uint32_t taken = 0;  // so far

  // The next tile, or one that many behind it. It stays where it is until it is taken.
  __device__ __forceinline__ const Tile& look(uint32_t ahead = 0) const {
    const uint32_t stage = (taken + ahead) % kTileStages, phase = (taken + ahead) / kTileStages % 2;
    shared.tile_full[stage].wait(phase);
    return shared.tiles[stage];
  }

  // By a warp, of which one lane arrives for all.
  __device__ __forceinline__ void take_together() {
    __syncwarp();
    if (lane() == 0) {
      shared.tile_empty[taken % kTileStages].arrive();
    }
    ++taken;
  }
};

// A warp has 16 of an accumulator's 64 rows, from warp_row() on.
__device__ __forceinline__ int warp_row() {
  return threadIdx.x % kWarpgroup / 32 * 16;
}

// A thread has two of them, thread_row() and eight below: element i is in row i / 2 % 2 and in
// column i / 4 * 8 + i % 2, counted from 2 * (lane % 4). Four lanes share a row.
__device__ __forceinline__ int thread_row() {
  return warp_row() + lane() / 4;
}

// Which of a thread's two rows element i is in, and which column, counted as above.
__device__ constexpr int row_of(int i) {
  return i / 2 % 2;
}
__device__ constexpr int column_of(int i) {
  return i / 4 * 8 + i % 2;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

// The largest of a thread's n scores in its two rows: two chains a row, r and r + 2, to hide
// latency.
template <int n>
__device__ __forceinline__ void find_largest(const float* s, float (&chains)[4]) {
#pragma unroll
  for (int chain = 0; chain < 4; ++chain) {
    chains[chain] = s[2 * chain];
  }
#pragma unroll
  for (int i = 0; i < n; i += 2) {
    const int chain = row_of(i) + i / 4 % 2 * 2;
    chains[chain] = fmaxf(chains[chain], fmaxf(s[i], s[i + 1]));
  }
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// What a thread adds up of P in its two rows: two chains a row, to hide latency.
using Chains = float[4];

__device__ __forceinline__ void add_to(Chains& chains, int i, float p, bool first) {
  const int chain = row_of(i) + i % 2 * 2;
  chains[chain] = first && i < 4 ? p : chains[chain] + p;
}

__device__ __forceinline__ float sum_of(const Chains& chains, int row) {
  return chains[row] + chains[row + 2];
}

// P of n scores with the same factor, relative to their rows' offsets; its sums begin with the
// first scores.
template <int n>
__device__ __forceinline__ void exponentiate_group(const float* s, float* p, float factor,
                                                   const float (&offset)[2], Chains& chains,
                                                   bool first) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    p[i] = exp2_approx(fmaf(s[i], factor, offset[row_of(i)]));
    add_to(chains, i, p[i], first);
  }
}

// What a thread keeps of its two rows, and how their scores become P.
struct Softmax {
  float scale = 0.f;                    // from scores to exponents of 2
  float max[2] = {kNoScore, kNoScore};  // of the scores
  float sum[2] = {0.f, 0.f};            // of this thread's part of P
  float rescale[2] = {1.f, 1.f};        // of O, from the last reference to this one
  bool raised = false;                  // whether there is any
  bool far = false;                     // see move_far

  // What a row's exponents are relative to. It is rounded here and nowhere else: P, its sum and the
  // log-sum-exp of a row share that rounding, and it cancels out.
  __device__ __forceinline__ float reference(int r) const { return __fmul_rn(max[r], scale); }

  // What is added to a row's scaled scores, which are relative to its maximum already where that is
  // far.
  __device__ __forceinline__ float offset_of(int r) const { return far ? 0.f : -reference(r); }

  // The row maxima with a block of scores.
  __device__ __forceinline__ void find_top(const float (&s)[kBlockN / 2], float (&top)[2]) const {
    float chains[4];
    find_largest<kBlockN / 2>(s, chains);
    top[0] = fmaxf(max[0], fmaxf(chains[0], chains[2]));
    top[1] = fmaxf(max[1], fmaxf(chains[1], chains[3]));
  }

  __device__ __forceinline__ bool is_far(int r) const {
    return fabsf(reference(r)) >= kFar && max[r] > kNoScore;
  }

  // Of scores this large fp32 rounds the exponents to whole numbers, or worse. So from here to the
  // end of the tile the row maxima are subtracted before scores are scaled, which is exact, and
  // each block finds its own.
  __device__ __forceinline__ void move_far(float (&s)[kBlockN / 2], const float (&before)[2],
                                           const float (&old)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float rise = far ? (before[r] - max[r]) * scale : __fmaf_rn(-max[r], scale, old[r]);
      rescale[r] = before[r] == kNoScore ? 0.f : exp2_approx(rise);
    }
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) {
      s[i] -= max[row_of(i)];
    }
    far = true;
  }

  // Updates the row maxima by a block of scores, and rescales what is relative to them.
  __device__ __forceinline__ void update_row_max(float (&s)[kBlockN / 2]) {
    float top[2];
    find_top(s, top);
    const float before[2] = {max[0], max[1]};
    const float old[2] = {reference(0), reference(1)};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[r] = quad_max(top[r]);
      rescale[r] = exp2_approx(old[r] - reference(r));
    }
    if (far || is_far(0) || is_far(1)) {
      move_far(s, before, old);
    }
    sum[0] *= rescale[0];
    sum[1] *= rescale[1];
  }

  // P of a block of scores, with these offsets, and its row sums. Returns whether these are so
  // small that P fits.
  __device__ __forceinline__ bool exponentiate(const float (&s)[kBlockN / 2],
                                               float (&p)[kBlockN / 2], float (&part)[2],
                                               const float (&offset)[2]) const {
    Chains chains;
    exponentiate_group<kBlockN / 2>(s, p, scale, offset, chains, true);
    part[0] = sum_of(chains, 0);
    part[1] = sum_of(chains, 1);
    return part[0] <= kMaxPartialSum && part[1] <= kMaxPartialSum;
  }

  // P of a block of scores, in place, relative to the row maxima; its row sums are added up.
  __device__ __forceinline__ void exponentiate(float (&s)[kBlockN / 2]) {
    const float offset[2] = {offset_of(0), offset_of(1)};
    float part[2];
    exponentiate(s, s, part, offset);
    sum[0] += part[0];
    sum[1] += part[1];
  }

  // P of a block of scores, relative to the row maxima so far; part: its row sums. Returns whether
  // this thread's P fits, which small sums prove.
  __device__ __forceinline__ bool guess(const float (&s)[kBlockN / 2], float (&p)[kBlockN / 2],
                                        float (&part)[2]) const {
    const float offset[2] = {-reference(0), -reference(1)};
    return exponentiate(s, p, part, offset) && !far;
  }

  // Whether the scores of the first block are so widely spread, in most rows of the warp, that of
  // its keys the largest alone counts: then later blocks are likely to outgrow it.
  __device__ __forceinline__ bool spread() const {
    return __popc(__ballot_sync(0xffffffff, sum[0] + sum[1] < kSpreadSum)) > kSpreadThreads;
  }
};

// wgmma is asynchronous: an empty asm statement on each operand register keeps the compiler from
// moving other uses of it past this point.
template <class T, int n>
__device__ __forceinline__ void fence_operand(T (&registers)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if constexpr (sizeof(T) == sizeof(float) && !std::is_integral_v<T>) {
      asm volatile("" : "+f"(registers[i])::"memory");
    } else {
      asm volatile("" : "+r"(registers[i])::"memory");
    }
  }
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// A matrix descriptor: an operand's address and the offsets between its core matrices. Addresses in
// units of 16 bytes never carry out of their 14 bits, so that only the low word changes.
struct Descriptor {
  uint32_t low, high;

  __device__ __forceinline__ Descriptor operator+(uint32_t offset) const {
    return {low + offset, high};
  }
  __device__ __forceinline__ uint64_t bits() const { return uint64_t(high) << 32 | low; }
};

// leading_byte_offset: from slab to slab, for slabs along M or N; otherwise unused.
template <int slab>
__device__ __forceinline__ Descriptor descriptor(const Element* tile,
                                                 cute::SM90::GMMA::LayoutType layout,
                                                 uint32_t leading_byte_offset = 16) {
  constexpr uint32_t stride_byte_offset = 8 * slab * sizeof(Element);
  const uint32_t start = cute::cast_smem_ptr_to_uint(tile) % (1 << 18);  // in its own block
  return {start >> 4 | leading_byte_offset >> 4 << 16, stride_byte_offset >> 4 | uint32_t(layout)
                                                                                     << 30};
}

// From a descriptor to that of the k-th column of a tile of `rows` rows.
template <int rows, int slab>
__device__ constexpr uint32_t column_offset(int k) {
  return (k / slab * rows * slab + k % slab) * sizeof(Element) >> 4;
}

// S = or += Q Kᵀ, kStepK columns of each, both from shared memory.
template <bool accumulate>
__device__ __forceinline__ void wgmma_qk(float (&c)[64], Descriptor a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63 }, "
      "%64, %65, %66, 1, 1, 0, 0;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]),
        "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]),
        "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]),
        "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]),
        "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]),
        "+f"(c[63])
      : "l"(a.bits()), "l"(b.bits()), "n"(accumulate ? 1 : 0));
}

// kOutputColumns columns of O = or += P V, kStepK keys of each, P from registers.
template <bool accumulate>
__device__ __forceinline__ void wgmma_pv(float (&c)[64], const uint32_t* a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63 }, "
      "{ %64, %65, %66, %67 }, %68, %69, 1, 1, 1;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]),
        "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]),
        "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]),
        "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]),
        "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]),
        "+f"(c[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "n"(accumulate ? 1 : 0));
}

__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

constexpr int kScheduler = kStore + kConsumers;  // and up: the turn of each

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

using OutPair = __nv_bfloat162;

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const OutPair pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Byte offset of an element in a slab, swizzled as TMA and wgmma do: bits 4… are xored with bits
// 7….
template <int slab, int swizzle_bits>
__device__ __forceinline__ int swizzled(int row, int column) {
  const int offset = (row * slab + column) * sizeof(OutElement);
  return offset ^ (offset >> 3 & ((1 << swizzle_bits) - 1) << 4);
}

// Stores four 8x8 matrices of 16-bit elements, a 16x16 block of an accumulator, at `address`, which
// each lane gives for row lane % 16 and column lane / 16 * 8.
__device__ __forceinline__ void store_matrices(void* address, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4 };" ::"r"(
                   cute::cast_smem_ptr_to_uint(address)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Rounds a warp's 16 rows of an accumulator, element(i), to OutElement and writes them to slabs of
// 64 rows. Returns whether all of this thread's numbers are finite: then 0 times them is 0.
template <int columns, int slab, int swizzle_bits, class Elements>
__device__ __forceinline__ bool store_accumulator(OutElement* tile, Elements element) {
  const int row = warp_row() + lane() % 16;
  const OutPair zero = {};
  OutPair sum = zero;
#pragma unroll
  for (int column = 0; column < columns; column += 16) {
    char* base = reinterpret_cast<char*>(tile + column / slab * kWarpgroupRows * slab);
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = pack(element(column / 2 + 2 * i), element(column / 2 + 2 * i + 1));
      sum = __hfma2(reinterpret_cast<const OutPair&>(pairs[i]), zero, sum);
    }
    store_matrices(base + swizzled<slab, swizzle_bits>(row, column % slab + lane() / 16 * 8),
                   pairs[0], pairs[1], pairs[2], pairs[3]);
  }
  return __hbeq2(sum, zero);
}

// ---- Loading ---------------------------------------------------------------------------------

// Copies tiles from global to shared memory. Used by a single thread.
struct Loader {
  const Params& params;
  SharedStorage& shared;
  RingPosition<kStages> k, v;

  // Where a sequence ends, and how many rows it has.
  struct Rows {
    int seqlen, end;
  };

  __device__ __forceinline__ static Rows of_q(const Tile& tile) {
    return {tile.sequence.seqlen_q, tile.sequence.end_q};
  }
  __device__ __forceinline__ static Rows of_k(const Tile& tile) {
    return {tile.sequence.seqlen_k, tile.sequence.end_k};
  }

  // One box per slab; rows past the sequence, though another begins there, and columns past the
  // head dim are filled with zeros.
  template <int columns, int rows, int slab>
  __device__ __forceinline__ void copy(const CUtensorMap& map, TransactionBarrier& full,
                                       Element* tile, int row, int head, Rows sequence,
                                       cute::TMA::CacheHintSm90 hint) {
    full.arrive_and_expect_tx(rows * columns * sizeof(Element));
#pragma unroll kUnrolledCopies
    for (int column = 0; column < columns; column += slab) {
      cute::SM90_TMA_LOAD_5D::copy(&map, reinterpret_cast<uint64_t*>(&full),
                                   static_cast<uint64_t>(hint), tile + column * rows, column,
                                   kRagged - sequence.seqlen + row, head, kRagged, sequence.end);
    }
  }

  // The boxes of a warpgroup's rows of Q from a query on: of each query the heads that share a
  // tile's rows, side by side.
  __device__ __forceinline__ void copy_q(TransactionBarrier& full, Element* rows, int query,
                                         int head, Rows sequence) {
    full.arrive_and_expect_tx(params.pack.value * params.queries * kHeadDimPadded *
                              sizeof(Element));
#pragma unroll kUnrolledCopies
    for (int column = 0; column < kHeadDimPadded; column += kQkSlab) {
      cute::SM90_TMA_LOAD_5D::copy(&params.q, reinterpret_cast<uint64_t*>(&full),
                                   static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST),
                                   rows + column * kWarpgroupRows, column, head * params.pack.value,
                                   kRagged - sequence.seqlen + query, kRagged, sequence.end);
    }
  }

  // Zeros rows of the warpgroups that hold no head of a whole query, once: nobody ever loads them,
  // and scores of zeros disturb no other row.
  __device__ __forceinline__ void clear_unused_rows() {
    constexpr int kPieces = kQkSlab * sizeof(Element) / sizeof(uint4);  // of a row of a slab
    const int used = params.pack.value * params.queries;
    if (used == kWarpgroupRows) {
      return;
    }
#pragma unroll 1
    for (int first = 0; first < kQStages * kBlockM * kHeadDimPadded;
         first += kWarpgroupRows * kQkSlab) {  // slabs
      uint4* slab = reinterpret_cast<uint4*>(shared.q[0] + first);
      for (int i = used * kPieces; i < kWarpgroupRows * kPieces; ++i) {
        slab[i] = {};
      }
    }
    cutlass::arch::fence_view_async_shared();
  }

  uint32_t turns = 0;  // of warpgroups, each for its rows of Q

  __device__ __forceinline__ void load_q(const Tile& tile) {
    if (turns == 0) {
      clear_unused_rows();
    }
    // The rows of each warpgroup that has some, as soon as it has read its last ones.
#pragma unroll 1
    for (int i = 0; i < tile.warpgroups; ++i, ++turns) {
      const uint32_t consumer = turns % kConsumers, round = turns / kConsumers;
      const uint32_t stage = round % kQStages, phase = round / kQStages % 2;
      shared.q_empty[stage][consumer].wait(phase ^ 1);
      copy_q(shared.q_full[stage][consumer],
             shared.q[stage] + consumer * kWarpgroupRows * kHeadDimPadded,
             tile.first_row + i * params.queries, tile.head, of_q(tile));
    }
  }

  __device__ __forceinline__ void load_k(const Tile& tile, int block) {
    shared.k_empty[k.stage].wait(k.phase ^ 1);
    copy<kHeadDimPadded, kBlockN, kQkSlab>(params.k, shared.k_full[k.stage], shared.k[k.stage],
                                           block * kBlockN, tile.kv_head, of_k(tile),
                                           cute::TMA::CacheHintSm90::EVICT_LAST);
    k.advance();
  }

  __device__ __forceinline__ void load_v(const Tile& tile, int block) {
    shared.v_empty[v.stage].wait(v.phase ^ 1);
    copy<kHeadDimVPadded, kBlockN, kVSlab>(params.v, shared.v_full[v.stage], shared.v[v.stage],
                                           block * kBlockN, tile.kv_head, of_k(tile),
                                           cute::TMA::CacheHintSm90::EVICT_LAST);
    v.advance();
  }
};

// The warp that draws tiles and passes them on to all others.
__device__ __forceinline__ void schedule_tiles(const Params& params, SharedStorage& shared) {
  TileFinder finder{params};
  finder.begin_with_longest(shared.counted);
  int number = blockIdx.x;  // nobody draws the first tile of each block
  TileRing ring;
  for (uint32_t passed_on = 0;; ++passed_on) {
    const uint32_t stage = passed_on % kTileStages, phase = passed_on / kTileStages % 2;
    shared.tile_empty[stage].wait(phase ^ 1);
    const bool found = finder.find(number, shared.tiles[stage]);
    __syncwarp();
    if (lane() == 0) {
      ring.pass_on(shared, stage);
    }
    if (!found) {
      return;
    }
    // The last to draw, one past the end for each block, wraps the counter to zero: the next call
    // finds it as this one did.
    shared.tile_wanted.wait(passed_on % 2);
    int drawn = 0;
    if (lane() == 0) {
      drawn = atomicInc(params.tiles_drawn, finder.tiles - 1);
    }
    number = gridDim.x + __shfl_sync(0xffffffff, drawn, 0);
  }
}

// The tiles for the producer, who says when the next one is to be drawn.
struct TileRequests : Tiles {
  // By a single thread.
  __device__ __forceinline__ void take() { shared.tile_empty[taken++ % kTileStages].arrive(); }

  __device__ __forceinline__ void draw() { shared.tile_wanted.arrive(); }

  // The block of a tile at which the next tile is drawn.
  __device__ __forceinline__ static int draws_at(const Blocks& blocks) {
    return blocks.first + kDrawAhead;
  }
};

// The producer warp.
__device__ __forceinline__ void produce(const Params& params, SharedStorage& shared) {
  Loader loader{params, shared};
  TileRequests tiles{shared};
  for (Tile tile; (tile = tiles.look()).blocks.last >= tile.blocks.first;) {
    tiles.take();
    if (tile.blocks.last == tile.blocks.first) {
      tiles.draw();
      continue;
    }
    if (tile.blocks.last - tile.blocks.first <= kDrawAhead) {
      tiles.draw();  // before it waits for buffers
    }
    loader.load_k(tile, tile.blocks.last - 1);
    loader.load_q(tile);
    for (int block = tile.blocks.last - 1; block >= tile.blocks.first; --block) {
      if (block == tiles.draws_at(tile.blocks)) {
        tiles.draw();
      }
      if (block > tile.blocks.first) {  // one ahead of V, because S is computed before P
        loader.load_k(tile, block - 1);
      }
      loader.load_v(tile, block);
    }
  }
}

// ---- Multiplying -----------------------------------------------------------------------------

// One warpgroup: 64 rows of each tile.
struct Consumer {
  const Params& params;
  SharedStorage& shared;
  const int warpgroup;  // 0 … kConsumers - 1
  RingPosition<kQStages> q;
  RingPosition<kStages> k, v;
  bool k_ready = false, v_ready = false;  // try_wait results of the current K and V

  __device__ __forceinline__ void wait_q() { shared.q_full[q.stage][warpgroup].wait(q.phase); }

  __device__ __forceinline__ void release_q(bool final_block) {
    if (lane() == 0 && final_block) {
      shared.q_empty[q.stage][warpgroup].arrive();
    }
  }

  // Even a successful wait has latency. So a try_wait for the next buffer is issued when one is
  // released, and its result arrives under the softmax.
  __device__ __forceinline__ void wait_k() {
    if (!k_ready) {
      shared.k_full[k.stage].wait(k.phase);
    }
  }

  __device__ __forceinline__ void release_k() {
    release(shared.k_empty[k.stage]);
    k.advance();
    k_ready = shared.k_full[k.stage].test_wait(k.phase);
  }

  __device__ __forceinline__ void wait_v() {
    if (!v_ready) {
      shared.v_full[v.stage].wait(v.phase);
    }
  }

  __device__ __forceinline__ void release_v() {
    release(shared.v_empty[v.stage]);
    v.advance();
    v_ready = shared.v_full[v.stage].test_wait(v.phase);
  }

  // One arrival per warp, since wgmma completes per warp.
  __device__ __forceinline__ void release(Barrier& empty) {
    if (lane() == 0) {
      empty.arrive();
    }
  }

  // Of a tile only some warpgroups have rows: how many others have some before this one's.
  __device__ __forceinline__ int place(const Tile& tile) {
    return (warpgroup + kConsumers - tile.first_warpgroup) % kConsumers;
  }
  __device__ __forceinline__ bool has_rows(const Tile& tile) {
    return place(tile) < tile.warpgroups;
  }
  // A warpgroup's first query.
  __device__ __forceinline__ int first_row(const Tile& tile) {
    return tile.first_row + place(tile) * params.queries;
  }
  // Which of the warpgroup's queries a row is of. A branch here would cost all steps registers.
  __device__ __forceinline__ int query_of(int row) const {
    const int quotient = __umulhi(row, params.pack.multiplier) >> params.pack.shift;
    return params.pack.value == 1 ? row : quotient;
  }

  // Of a row of the warpgroup's, one of several of a query.
  __device__ __forceinline__ Keys row_keys(const Tile& tile, int row) {
    return seen_by(tile.sequence, first_row(tile) + query_of(row));
  }

  // Masks the keys of a block that this thread's two rows do not see.
  __device__ __forceinline__ void mask_block(float (&s)[kBlockN / 2], const Tile& tile, int block) {
    const int row = thread_row(), first_key = block * kBlockN + lane() % 4 * 2;
    const Keys seen[2] = {row_keys(tile, row), row_keys(tile, row + 8)};
    const int last[2] = {seen[0].last - first_key, seen[1].last - first_key};
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) {
      if (column_of(i) >= last[row_of(i)]) {
        s[i] = -INFINITY;
      }
    }
  }

  // How many keys, from a block's first on, the first of this warp's rows sees.
  __device__ __forceinline__ int keys_seen(const Tile& tile, int block) {
    const Keys seen = row_keys(tile, warp_row());
    return seen.last - block * kBlockN;
  }

  // P as the register operand of the PV GEMM, whose layout is the accumulator's.
  using Probabilities = uint32_t[kBlockN * sizeof(Element) / 8];

  __device__ __forceinline__ void pack_p(Probabilities& p, const float (&s)[kBlockN / 2]) {
#pragma unroll
    for (int i = 0; i < kBlockN / 4; ++i) {
      p[i] = pack(s[2 * i], s[2 * i + 1]);
    }
  }

  // The descriptor of V, which lies by rows, and from it to that of its n-th row.
  __device__ __forceinline__ Descriptor v_begin() const {
    return descriptor<kVSlab>(shared.v[v.stage], kVDescriptor, kBlockN * kVSlab * sizeof(Element));
  }
  __device__ __forceinline__ static uint32_t v_offset(int n) {
    return n * kVSlab * sizeof(Element) >> 4;
  }

  // Issues O += PV.
  __device__ __forceinline__ void issue_pv(Output& o, Probabilities& p) {
    const Descriptor first = v_begin();
    fence_operand(o);
    fence_operand(p);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < kBlockN; n += kStepK) {
      wgmma_pv<true>(o, p + n * sizeof(Element) / 8, first + v_offset(n));
    }
    wgmma_commit();
  }

  // O is complete but for GEMMs that were issued later: V is released.
  template <int later = 0>
  __device__ __forceinline__ void finish_pv(Output& o) {
    wgmma_wait<later>();
    fence_operand(o);
    release_v();
  }

  // Makes O relative to the row maxima so far.
  __device__ __forceinline__ void rescale_output(Output& o, Softmax& softmax) {
    if (!softmax.raised) {
      return;
    }
#pragma unroll
    for (int i = 0; i < kOutputColumns / 2; ++i) {
      o[i] *= softmax.rescale[row_of(i)];
    }
  }

  // Issues S = QKᵀ.
  __device__ __forceinline__ void issue_qk(float (&s)[kBlockN / 2]) {
    const Descriptor q_rows = descriptor<kQkSlab>(
        shared.q[q.stage] + warpgroup * kWarpgroupRows * kHeadDimPadded, kQkDescriptor);
    const Descriptor k_rows = descriptor<kQkSlab>(shared.k[k.stage], kQkDescriptor);
    fence_operand(s);
    wgmma_fence();
    wgmma_qk<false>(s, q_rows, k_rows);
#pragma unroll
    for (int d = kStepK; d < kHeadDimPadded; d += kStepK) {
      wgmma_qk<true>(s, q_rows + column_offset<kWarpgroupRows, kQkSlab>(d),
                     k_rows + column_offset<kBlockN, kQkSlab>(d));
    }
    wgmma_commit();
  }

  // S is complete: K is released, and Q after the tile's final block.
  __device__ __forceinline__ void finish_qk(float (&s)[kBlockN / 2], bool final_block) {
    fence_operand(s);
    release_k();
    release_q(final_block);
  }

  // The softmax of rows before their first score.
  __device__ __forceinline__ Softmax fresh_softmax() const { return {params.scale_log2}; }

  // P of a tile's first block, whose S is complete and masked.
  __device__ __forceinline__ void first_scores(const Tile& tile, float (&s)[kBlockN / 2],
                                               Probabilities& p, Softmax& softmax) {
    softmax.update_row_max(s);
    softmax.exponentiate(s);
    pack_p(p, s);
    const int block = tile.blocks.last - 1;
    spread_first = block - (spread(tile, block, softmax) ? kSpreadBlocks : -1);
  }

  // P of a block whose S is complete and masked, relative to the maximum so far. Where that makes P
  // too large, which is rare, S is still there, and the maximum is updated after all: O is
  // rescaled.
  __device__ __forceinline__ void next_scores(float (&s)[kBlockN / 2], Probabilities& p, Output& o,
                                              Softmax& softmax) {
    float guessed[kBlockN / 2], part[2];
    const bool fits = __all_sync(0xffffffff, softmax.guess(s, guessed, part));
    pack_p(p, guessed);
    if (!fits) {
      part[0] = part[1] = 0.f;  // added to the sums already
      softmax.update_row_max(s);
      softmax.exponentiate(s);
      pack_p(p, s);
    }
    softmax.sum[0] += part[0];
    softmax.sum[1] += part[1];
    softmax.raised = !fits;
    rescale_output(o, softmax);
  }

  int spread_first;  // from this block on to the tile's last, maxima are found before P

  // The same while PV of the block before ends; with each_maximum the row maxima are found before
  // P.
  template <bool each_maximum>
  __device__ __forceinline__ void next_scores_under_pv(float (&s)[kBlockN / 2], Probabilities& p,
                                                       Output& o, Softmax& softmax) {
    if (each_maximum) {
      softmax.update_row_max(s);
    }
    finish_pv(o);
    fence_operand(s);  // P's registers are free only now
    if (each_maximum) {
      softmax.exponentiate(s);
      pack_p(p, s);
      softmax.raised = true;
      rescale_output(o, softmax);
    } else {
      next_scores(s, p, o, softmax);
    }
  }

  // Whether the first block's scores are widely spread in most warps of the warpgroup, enough of
  // which see keys enough to tell: all must take the same steps.
  __device__ __forceinline__ bool spread(const Tile& tile, int block, const Softmax& softmax) {
    uint8_t (&votes)[4] = shared.votes[warpgroup];
    const int vote = softmax.spread() | (keys_seen(tile, block) >= kSpreadKeys) << 4;
    if (lane() == 0) {
      votes[threadIdx.x % kWarpgroup / 32] = vote;
    }
    barrier_sync(kStore + warpgroup, kWarpgroup);
    const int counted = votes[0] + votes[1] + votes[2] + votes[3];
    return counted % 16 >= kSpreadWarps && counted / 16 >= kSpreadSeeing;
  }

  __device__ __forceinline__ void pass_on_turn() {
    barrier_arrive(kScheduler + (warpgroup + 1 == kConsumers ? 0 : warpgroup + 1), 2 * kWarpgroup);
  }

  // Ping-pong: while one warpgroup has the tensor cores, the others do softmax. A turn ends when
  // GEMMs are issued, before any wait for Q; a block that is skipped has its turn too. Only in
  // tiles of which all have rows, each of which has as many turns for one as for another.
  __device__ __forceinline__ void begin_turn(const Tile& tile) {
    if (tile.warpgroups == kConsumers) {
      barrier_sync(kScheduler + warpgroup, 2 * kWarpgroup);
    }
  }
  __device__ __forceinline__ void end_turn(const Tile& tile) {
    if (tile.warpgroups == kConsumers) {
      pass_on_turn();
    }
  }

  // One block, with two GEMMs in flight: S of this block and PV of the block before. Its softmax
  // runs under the GEMMs of other warpgroups.
  template <bool masked, bool each_maximum = false>
  __device__ __forceinline__ void step(const Tile& tile, int block, float (&s)[kBlockN / 2],
                                       Probabilities& p, Output& o, Softmax& softmax) {
    wait_k();
    begin_turn(tile);
    issue_qk(s);
    wait_v();
    issue_pv(o, p);
    end_turn(tile);
    wgmma_wait<1>();
    finish_qk(s, block == tile.blocks.first);
    if (masked) {
      mask_block(s, tile, block);
    }
    next_scores_under_pv<each_maximum>(s, p, o, softmax);
  }

  // P of a tile's first block, once its S is complete.
  __device__ __forceinline__ void finish_first(const Tile& tile, float (&s)[kBlockN / 2],
                                               Probabilities& p, Softmax& softmax) {
    finish_qk(s, tile.blocks.last - 1 == tile.blocks.first);
    mask_block(s, tile, tile.blocks.last - 1);
    first_scores(tile, s, p, softmax);
  }

  // The first block of a tile, with nothing else in flight.
  __device__ __forceinline__ void first_block(const Tile& tile, float (&s)[kBlockN / 2],
                                              Probabilities& p, Softmax& softmax) {
    wait_q();
    wait_k();
    issue_qk(s);
    wgmma_wait<0>();
    finish_first(tile, s, p, softmax);
  }

  // The last PV of a tile, then the first S of the next, under which O is stored.
  __device__ __forceinline__ void next_tile(Tiles& tiles, Tile& tile, float (&s)[kBlockN / 2],
                                            Probabilities& p, Output& o, Softmax& softmax) {
    wait_v();
    begin_turn(tile);
    issue_pv(o, p);
    end_turn(tile);
    q.advance();
    wait_q();
    wait_k();
    issue_qk(s);
    finish_pv<1>(o);
    store(Tile(tiles.look()), o, softmax);
    reset(o, softmax);
    tiles.take_together();
    tile = tiles.look();
    wgmma_wait<0>();
    finish_first(tile, s, p, softmax);
  }

  // Gives the buffers of a tile's blocks back as they become full.
  __device__ __forceinline__ void pass_over(int blocks) {
    for (; blocks > 0; --blocks) {
      wait_k();
      wait_v();
      __syncwarp();  // one lane arrives for all
      release_k();
      release_v();
    }
  }

  __device__ __forceinline__ static int blocks_in(const Tile& tile) {
    return tile.blocks.last - tile.blocks.first;
  }

  // Passes over tiles, up to the next of which this warpgroup has rows; false at the end of those
  // that see a key.
  __device__ __forceinline__ bool next_with_rows(Tiles& tiles) {
    for (;;) {
      const Tile& tile = tiles.look();
      const int blocks = blocks_in(tile);
      if (blocks <= 0 || has_rows(tile)) {
        return blocks > 0;
      }
      tiles.take_together();
      pass_over(blocks);
    }
  }

  // The last PV of these tiles, with nothing else in flight, yet in its turn as where a next tile
  // follows.
  __device__ __forceinline__ void last_pv(const Tile& tile, Probabilities& p, Output& o) {
    wait_v();
    begin_turn(tile);
    issue_pv(o, p);
    end_turn(tile);
    finish_pv(o);
  }

  // A tile, and those that follow with rows of this warpgroup; of the last one, O is yet to be
  // stored, and the tile to be taken.
  __device__ __forceinline__ void mainloop(Tiles& tiles, Output& o, Softmax& softmax) {
    Tile tile = tiles.look();
    float s[kBlockN / 2];
    Probabilities p;
    first_block(tile, s, p, softmax);
    for (;;) {
      int block = tile.blocks.last - 2;
      for (; block >= tile.blocks.full_last; --block) {
        step<true>(tile, block, s, p, o, softmax);
      }
      // of widely spread scores, the first blocks
      for (; block >= max(tile.blocks.first, spread_first); --block) {
        step<false, true>(tile, block, s, p, o, softmax);
      }
      for (; block >= tile.blocks.first; --block) {
        step<false>(tile, block, s, p, o, softmax);
      }
      if (const Tile& next = tiles.look(1); blocks_in(next) <= 0 || !has_rows(next)) {
        break;
      }
      next_tile(tiles, tile, s, p, o, softmax);
    }
    last_pv(tile, p, o);
  }

  __device__ __forceinline__ void reset(Output& o, Softmax& softmax) {
#pragma unroll
    for (int i = 0; i < kOutputColumns / 2; ++i) {
      o[i] = 0.f;
    }
    softmax = fresh_softmax();
  }

  __device__ __forceinline__ void run() {
    if (warpgroup == kConsumers - 1) {
      pass_on_turn();  // warpgroup 0 is first
    }
    Tiles tiles{shared};
    Output o = {};
    Softmax softmax = fresh_softmax();
    for (;;) {
      if (next_with_rows(tiles)) {
        mainloop(tiles, o, softmax);
        q.advance();
      } else if (blocks_in(tiles.look()) < 0) {
        break;
      }
      // O of the last of these tiles, or of one that sees no key.
      store(Tile(tiles.look()), o, softmax);
      reset(o, softmax);
      tiles.take_together();
    }
    if (threadIdx.x % kWarpgroup == 0) {
      cute::tma_store_wait<0>();  // shared memory must outlive the copies from it
    }
  }

  __device__ __forceinline__ static int seqlen_q(const Tile& tile) {
    return tile.sequence.seqlen_q;
  }

  // Where LSE of one of the heads that share a tile begins: the first row of its sequence.
  __device__ __forceinline__ int64_t lse_begin(const Tile& tile, int number) const {
    const int head = tile.head * params.pack.value + number;
    return head * params.lse_stride_head + tile.sequence.end_q - tile.sequence.seqlen_q;
  }

  // Copies columns of the warpgroup's rows of O, from `column` on, a slab from shared memory.
  __device__ __forceinline__ void copy_out(const Tile& tile, const OutElement* slab, int column) {
    cute::SM90_TMA_STORE_5D::copy(&params.out, slab, column, tile.head * params.pack.value,
                                  kRagged - tile.sequence.seqlen_q + first_row(tile), kRagged,
                                  tile.sequence.end_q);
  }

  // Writes columns of the warpgroup's rows to shared memory, averages of V, from column `first` of
  // O on.
  template <int columns>
  __device__ __forceinline__ void round_rows(OutElement* rows, const Output& o, int first,
                                             const float (&inverse)[2], const bool (&empty)[2]) {
    const auto average = [&](int i) { return o[first / 2 + i] * inverse[row_of(i)]; };
    // A row that sees no key is zeros, not 0 times a V that may not be finite.
    const auto limited = [&](int i) { return empty[row_of(i)] ? 0.f : average(i); };
    // What is not finite shows what must be limited: rare, and cheaper to look for once it is
    // rounded.
    const bool finite = store_accumulator<columns, kOSlab, kOSwizzleBits>(rows, average);
    if (!__all_sync(0xffffffff, finite)) {
      store_accumulator<columns, kOSlab, kOSwizzleBits>(rows, limited);
    }
  }

  // Writes columns of the warpgroup's rows of O, from column `first` on, through a buffer of so
  // many.
  template <int columns>
  __device__ __forceinline__ void write_columns(const Tile& tile, const Output& o, int first,
                                                const float (&inverse)[2], const bool (&empty)[2]) {
    OutElement* rows = shared.o + warpgroup * kWarpgroupRows * columns;
    const bool leader = threadIdx.x % kWarpgroup == 0;
    if (leader) {
      cute::tma_store_wait<0>();  // what was there before has been read
    }
    barrier_sync(kStore + warpgroup, kWarpgroup);
    round_rows<columns>(rows, o, first, inverse, empty);
    cutlass::arch::fence_view_async_shared();
    barrier_sync(kStore + warpgroup, kWarpgroup);
    if (leader) {
#pragma unroll
      for (int column = 0; column < columns; column += kOSlab) {
        copy_out(tile, rows + column * kWarpgroupRows, first + column);
      }
      cute::tma_store_arrive();
    }
  }

  __device__ __forceinline__ void write(const Tile& tile, const Output& o,
                                        const float (&inverse)[2], const bool (&empty)[2]) {
    write_columns<kHeadDimVPadded>(tile, o, 0, inverse, empty);
  }

  // Writes the warpgroup's rows of O and LSE.
  __device__ __forceinline__ void store(const Tile& tile, Output& o, Softmax& softmax) {
    float inverse[2];
    bool empty[2];  // no key seen
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(softmax.sum[r]);
      empty[r] = sum == 0.f;
      inverse[r] = reciprocal_approx(sum);
      const int row = thread_row() + r * 8, query = query_of(row);
      const bool exists = query < params.queries && first_row(tile) + query < seqlen_q(tile);
      if (params.lse && lane() % 4 == 0 && exists) {
        const int64_t head = lse_begin(tile, row - query * params.pack.value);
        params.lse[head + first_row(tile) + query] =
            empty[r] ? -INFINITY : (softmax.reference(r) + log2_approx(sum)) * 0.69314718056f;
      }
    }
    write(tile, o, inverse, empty);
  }
};

// ---- The kernel ------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads, 1)
    attention_forward(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);

  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(&params.q);
    cute::prefetch_tma_descriptor(&params.k);
    cute::prefetch_tma_descriptor(&params.v);
    cute::prefetch_tma_descriptor(&params.out);
    for (int stage = 0; stage < kQStages; ++stage) {
      for (int consumer = 0; consumer < kConsumers; ++consumer) {
        shared.q_full[stage][consumer].init(1);
        shared.q_empty[stage][consumer].init(kWarpgroup / 32);
      }
    }
    for (int stage = 0; stage < kStages; ++stage) {
      shared.k_full[stage].init(1);
      shared.v_full[stage].init(1);
      shared.k_empty[stage].init(kConsumers * kWarpgroup / 32);
      shared.v_empty[stage].init(kConsumers * kWarpgroup / 32);
    }
    for (int stage = 0; stage < kTileStages; ++stage) {
      shared.tile_full[stage].init(1);
      shared.tile_empty[stage].init(kTileReaders);
    }
    shared.tile_wanted.init(1);
    cutlass::arch::fence_barrier_init();
  }
  TileFinder{params}.count_all(shared.counted);
  __syncthreads();
  const int warpgroup =
      __shfl_sync(0xffffffff, threadIdx.x / kWarpgroup, 0);  // known to be uniform
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    if (threadIdx.x == 0) {
      produce(params, shared);
    } else if (threadIdx.x / 32 == 1) {
      schedule_tiles(params, shared);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    Consumer consumer{params, shared, warpgroup - 1};
    consumer.run();
  }
}

}  // namespace fagen_fwd_bf16_d128_causal_m128n128_varlen_packgqa_kernel

// ---- The C interface -------------------------------------------------------------------------

#ifndef FAGEN_FORWARD_VARLEN_ARGS
#define FAGEN_FORWARD_VARLEN_ARGS 1

extern "C" {

// One varlen call of a kernel of kind forward: the same struct for all of them. Strides are in
// elements; a dimension without one is contiguous.
struct FagenForwardVarlenArgs {
  uint32_t struct_bytes;  // sizeof(FagenForwardVarlenArgs)
  uint32_t version;       // 1: callers built for another are recognised
  void* workspace;  // from a multiple of 16 bytes on as large as fagen_<slug>_workspace says; null
                    // where that is nothing
  int64_t workspace_bytes;   // how large it is
  const void* q;             // bf16 (total_q, heads, 128)
  const void* k;             // bf16 (total_k, kv_heads, 128)
  const void* v;             // bf16 (total_k, kv_heads, 128)
  const void* cu_seqlens_q;  // int32 (offsets): the row of q at which each sequence begins, and the
                             // end of the last; offsets = batch + 1
  const void* cu_seqlens_k;  // int32 (offsets): the row of k and v at which each sequence begins,
                             // and the end of the last; offsets = batch + 1
  const void* seqused_k;  // int32 (offsets - 1): how many of its keys each sequence sees, the first
                          // ones; null: all
  void* out;  // bf16 (total_q, heads, 128): zeros in a row that sees no key, or is of no sequence
  void* lse;  // fp32 (heads, total_q): log-sum-exp, natural logarithm; minus infinity in a row that
              // sees no key; null if not wanted
  int64_t q_stride_head, q_stride_seq;
  int64_t k_stride_head, k_stride_seq;
  int64_t v_stride_head, v_stride_seq;
  int64_t out_stride_head, out_stride_seq;
  int64_t lse_stride_head;
  int32_t total_q, total_k, offsets, heads, kv_heads;
  float scale;  // of q kᵀ before the softmax; finite and positive, 1e+08 at most
};

}  // extern "C"

#elif FAGEN_FORWARD_VARLEN_ARGS != 1
#error "kernels of kind forward of two versions of fagen in one translation unit"
#endif

#ifndef FAGEN_KERNEL_INFO
#define FAGEN_KERNEL_INFO 2

extern "C" {

// What a kernel says of itself.
struct FagenKernelInfo {
  uint32_t struct_bytes;
  uint32_t shared_bytes;  // of a thread block
  uint32_t threads;       // of a thread block
  uint32_t launch_registers;
  const char* slug;
  const char* source_hash;
};

}  // extern "C"
#endif

extern "C" {

// Enqueues the kernel on `stream` (a cudaStream_t) of the current device: 0, or a status to
// explain.
int fagen_fwd_bf16_d128_causal_m128n128_varlen_packgqa(const struct FagenForwardVarlenArgs* args,
                                                       void* stream);
// How many bytes of workspace a call of these sizes needs; -1 where args is null, or a call of such
// sizes is refused. They are zeros before the first call, and each call leaves them so; calls that
// may run at once need one each.
int64_t fagen_fwd_bf16_d128_causal_m128n128_varlen_packgqa_workspace(
    const struct FagenForwardVarlenArgs* args);
const char* fagen_fwd_bf16_d128_causal_m128n128_varlen_packgqa_message(int status);
const struct FagenKernelInfo* fagen_fwd_bf16_d128_causal_m128n128_varlen_packgqa_info(void);

}  // extern "C"

// ---- The host's side -------------------------------------------------------------------------

#include "fagen_host.h"
#if FAGEN_HOST_H != 0xa95921b9
#error "the fagen_host.h beside this kernel is that of another version of fagen"
#endif

namespace fagen_fwd_bf16_d128_causal_m128n128_varlen_packgqa_host {

using namespace fagen_fwd_bf16_d128_causal_m128n128_varlen_packgqa_kernel;
using namespace fagen_host;
using fagen_host::ceil_div;  // of 64 bits: not what a kernel calls so

// What calls end with, by Status.
constexpr const char* kMessages[] = {
    "launched",
    "struct_bytes or version is that of another FagenForwardVarlenArgs",
    "a size is negative or too large",
    "heads must be a multiple of kv_heads",
    "there are 2^30 tiles or more",
    "scale must be finite and positive, scale 1e+08 at most",
    "a tensor is given that cannot be",
    "a tensor that is needed is null",
    "a tensor does not begin at a multiple of 16 bytes (cu_seqlens_q: 4, cu_seqlens_k: 4, seqused_k: 4, lse: 4)",
    "a stride is negative, too large, or no multiple of 16 bytes",
    "elements of an output (out, lse) overlap: a stride is 0 or too small",
    "the workspace is null, too small, or does not begin at a multiple of 16 bytes",
    "the current device is not a Hopper GPU (compute capability 9.0)",
    "the CUDA driver is missing, or too old for tensor maps",
    "the CUDA driver refused to describe a tensor for TMA",
    "the kernel could not be launched",
};

// Whether sizes go together, and are not too large.
Status check_sizes(const FagenForwardVarlenArgs& a) {
  for (const int size : {a.total_q, a.total_k, a.offsets, a.heads, a.kv_heads}) {
    if (size < 0 || size > 1073741824) {
      return kBadSize;
    }
  }
  if (a.kv_heads == 0 ? a.heads != 0 : a.heads % a.kv_heads != 0) {
    return kBadRatio;
  }
  if (double(ceil_div(a.total_q, 128) + a.offsets) * double(a.heads) >= 1 << 30) {
    return kTooMany;
  }
  return kOk;
}

// Of a call whose sizes are checked, which has fewer than 2^30 of what each record is of.
int64_t workspace_bytes([[maybe_unused]] const FagenForwardVarlenArgs& a) {
  return int64_t(4);
}

Status check(const FagenForwardVarlenArgs& a) {
  if (a.struct_bytes != sizeof(a) || a.version != FAGEN_FORWARD_VARLEN_ARGS) {
    return kWrongStruct;
  }
  if (const Status status = check_sizes(a)) {
    return status;
  }
  if (!(a.scale > 0) || !std::isfinite(a.scale) || a.scale > 100000000.0) {
    return kBadScalar;
  }
  for (const Status status : {
           check_tensor(a.q, 2, true, false, 4294967296, 128,
                        {{a.total_q, a.q_stride_seq}, {a.heads, a.q_stride_head}}),
           check_tensor(a.k, 2, true, false, 4294967296, 128,
                        {{a.total_k, a.k_stride_seq}, {a.kv_heads, a.k_stride_head}}),
           check_tensor(a.v, 2, true, false, 4294967296, 128,
                        {{a.total_k, a.v_stride_seq}, {a.kv_heads, a.v_stride_head}}),
           check_tensor(a.cu_seqlens_q, 4, false, false, kMostStride, a.offsets, {}),
           check_tensor(a.cu_seqlens_k, 4, false, false, kMostStride, a.offsets, {}),
           !a.seqused_k
               ? kOk
               : check_tensor(a.seqused_k, 4, false, false, kMostStride, a.offsets - 1, {}),
           check_tensor(a.out, 2, true, true, 4294967296, 128,
                        {{a.total_q, a.out_stride_seq}, {a.heads, a.out_stride_head}}),
           !a.lse ? kOk
                  : check_tensor(a.lse, 4, false, true, kMostStride, a.total_q,
                                 {{a.heads, a.lse_stride_head}}),
       }) {
    if (status) {
      return status;
    }
  }
  const int64_t needed = workspace_bytes(a);
  const bool misplaced = reinterpret_cast<uintptr_t>(a.workspace) % kAlignment != 0;
  return needed > 0 && (!a.workspace || a.workspace_bytes < needed || misplaced) ? kBadWorkspace
                                                                                 : kOk;
}

Status launch(const FagenForwardVarlenArgs& a, cudaStream_t stream) {
  if (a.heads == 0 || a.total_q == 0) {
    return kOk;
  }
  constexpr int shared_bytes = sizeof(SharedStorage);
  const int multiprocessors = prepare_device<attention_forward>(shared_bytes);
  if (multiprocessors == 0) {
    return kNotHopper;
  }
  if (!encode_tiled()) {
    return kNoDriver;
  }

  Params params;
  params.lse = static_cast<float*>(a.lse);
  params.lse_stride_head = a.lse_stride_head;
  params.cu_seqlens_k = static_cast<const int32_t*>(a.cu_seqlens_k);
  params.seqused_k = static_cast<const int32_t*>(a.seqused_k);
  params.total_q = a.total_q;
  params.total_k = a.total_k;
  params.tiles_drawn = static_cast<uint32_t*>(a.workspace);
  params.scale_log2 = a.scale * 1.44269504089f;

  // The most heads of a KV head that fill a warpgroup's rows but for one, or where those are one or
  // two, but for a few: they share a tile's rows, those of a query side by side.
  const int group = a.heads / a.kv_heads;
  int pack = 0;
  for (const int most_unused : {1, kMostUnused}) {
    if (pack < 3) {
      pack = std::min(group, kWarpgroupRows);
      while (group % pack != 0 || kWarpgroupRows % pack > most_unused) {
        --pack;
      }
    }
  }

  const int queries = kWarpgroupRows / pack, packs = a.heads / pack;
  params.pack = FastDivisor(pack);
  params.queries = queries;
  params.tile_queries = FastDivisor(kConsumers * queries);
  params.heads_per_kv_head = FastDivisor(group / pack);

  params.heads = packs;

  params.cu_seqlens_q = a.offsets > 0 ? static_cast<const int32_t*>(a.cu_seqlens_q) : nullptr;
  params.batch = std::max(0, a.offsets - 1);
  // How many tiles there are the GPU finds out: no more than these, of which each offset may add a
  // part.
  const int64_t most_tiles = (ceil_div(a.total_q, kBlockM) + a.offsets) * a.heads;
  const int grid = int(std::min<int64_t>(most_tiles, multiprocessors));

  params.exceeds_l2 =
      int64_t(a.total_k) * a.kv_heads * (kHeadDim + kHeadDimV) * sizeof(Element) > kL2Bytes;

  const Tensor q{.data = a.q,
                 .sizes = {kHeadDim, a.heads, a.total_q},
                 .strides = {a.q_stride_head, a.q_stride_seq},
                 .box = {kQkSlab, pack, queries},
                 .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                 .type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                 .element_bytes = sizeof(Element),
                 .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe_varlen_heads_first(&params.q, q, kRagged)) {
    return kTensorMapRefused;
  }

  const Tensor k{.data = a.total_k > 0 ? a.k : a.q,
                 .sizes = {kHeadDim, a.total_k, a.kv_heads},
                 .strides = {a.k_stride_seq, a.k_stride_head},
                 .box = {kQkSlab, kBlockN, 1},
                 .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                 .type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                 .element_bytes = sizeof(Element),
                 .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe_varlen(&params.k, k, kRagged)) {
    return kTensorMapRefused;
  }

  const Tensor v{.data = a.total_k > 0 ? a.v : a.q,
                 .sizes = {kHeadDimV, a.total_k, a.kv_heads},
                 .strides = {a.v_stride_seq, a.v_stride_head},
                 .box = {kVSlab, kBlockN, 1},
                 .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                 .type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                 .element_bytes = sizeof(Element),
                 .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe_varlen(&params.v, v, kRagged)) {
    return kTensorMapRefused;
  }

  const Tensor out{.data = a.out,
                   .sizes = {kHeadDimV, a.heads, a.total_q},
                   .strides = {a.out_stride_head, a.out_stride_seq},
                   .box = {kOSlab, pack, queries},
                   .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                   .type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                   .element_bytes = sizeof(OutElement),
                   .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe_varlen_heads_first(&params.out, out, kRagged)) {
    return kTensorMapRefused;
  }

  attention_forward<<<grid, kThreads, shared_bytes, stream>>>(params);
  return cudaGetLastError() == cudaSuccess ? kOk : kLaunchFailed;
}

}  // namespace fagen_fwd_bf16_d128_causal_m128n128_varlen_packgqa_host

extern "C" int fagen_fwd_bf16_d128_causal_m128n128_varlen_packgqa(
    const FagenForwardVarlenArgs* args, void* stream) {
  using namespace fagen_fwd_bf16_d128_causal_m128n128_varlen_packgqa_host;
  const Status status = args ? check(*args) : kNullPointer;
  return status ? status : launch(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t fagen_fwd_bf16_d128_causal_m128n128_varlen_packgqa_workspace(
    const FagenForwardVarlenArgs* args) {
  using namespace fagen_fwd_bf16_d128_causal_m128n128_varlen_packgqa_host;
  return args && !check_sizes(*args) ? workspace_bytes(*args) : -1;
}

extern "C" const char* fagen_fwd_bf16_d128_causal_m128n128_varlen_packgqa_message(int status) {
  using namespace fagen_fwd_bf16_d128_causal_m128n128_varlen_packgqa_host;
  constexpr int kNoKernel = 100;  // of who chooses among kernels
  return status >= 0 && status <= kLaunchFailed ? kMessages[status]
         : status == kNoKernel                  ? "no kernel computes that"
                                                : "unknown status";
}

extern "C" const FagenKernelInfo* fagen_fwd_bf16_d128_causal_m128n128_varlen_packgqa_info(void) {
  using namespace fagen_fwd_bf16_d128_causal_m128n128_varlen_packgqa_kernel;
  static const FagenKernelInfo info = {
      sizeof(FagenKernelInfo),
      kSharedBytes,
      kThreads,
      kLaunchRegisters,
      "fwd_bf16_d128_causal_m128n128_varlen_packgqa",
      "ac35fb82c1c996058026a75a69c23b6a2b6346099a51587d0ea15637a08446eb"};
  return &info;
}
// sha256 of what is above: 3271e8bfa2f2865a22bc50320d4191d2f70197b95083377b3d781ab15bd44869
