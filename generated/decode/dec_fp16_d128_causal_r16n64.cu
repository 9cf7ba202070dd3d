// dec_fp16_d128_causal_r16n64: attention of a few queries over many keys, for Hopper (sm_90a).
// Rendered by fagen; do not edit.
//
//   out = softmax(scale * q kᵀ) v,   lse = log of the sum of exp(scale * q kᵀ)
//
// The keys of a sequence are cut into 16 splits at most, by its own length alone. A unit of work is
// a split of one KV head for the queries of its group of query heads. A second kernel, which begins
// under the end of the first, combines what the splits gave in their order. So the bits of a
// sequence depend on no other. Thread blocks stay and take units in turns.
//
// Products are swapped: keys are the 64 rows of a WGMMA and queries its 16 columns, so few queries
// cost little. Sᵀ = K Qᵀ; P goes through shared memory; Oᵀ += Vᵀ Pᵀ with V as it lies. One warp
// loads by TMA, one warpgroup computes.
//
// Needs fagen_host.h, which lies beside it, the headers below, and
// -gencode=arch=compute_90a,code=sm_90a.

#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cutlass/arch/barrier.h>

namespace fagen_dec_fp16_d128_causal_r16n64_kernel {

// ---- The schedule ----------------------------------------------------------------------------

using Element = __half;
using Pair = __half2;

constexpr int kHeadDim = 128;
constexpr int kHeadDimV = 128;
constexpr int kHeadDimPadded = 128;  // in shared memory, in whole slabs
constexpr int kHeadDimVPadded = 128;
constexpr int kRows = 16;         // of queries that a unit of work has at most
constexpr int kBlockN = 64;       // keys of a step
constexpr int kBlocks = 2;        // that share an SM
constexpr int kMostBlocks = 5;    // of keys, up to which a sequence is one split
constexpr int kHeadsOfBlock = 3;  // of a KV head: a split has a block for so many at least,
constexpr int kLongestLeast = 4;  // up to so many blocks
constexpr int kThreads = 160;     // a warpgroup that computes, a warp that loads
constexpr int kLaunchRegisters = 168;
constexpr int kStepK = 16;  // the K of every wgmma
constexpr int kSlab = 64;   // columns: tiles lie as slabs of 128 bytes, all rows of one together
constexpr auto kDescriptor = cute::SM90::GMMA::LayoutType::B128;

constexpr int kStages = 5;  // buffers of the ring, in which blocks of K and V alternate
constexpr int kQStages = 2;
constexpr int kPrefetchWarp = 4;  // that asks L2 for first keys

constexpr float kRescaleThreshold = 8.0f;  // log2 units that scores may outgrow their reference by

constexpr int kNumSplits = 16;  // that a sequence's keys are cut into, at most

constexpr int kWarpgroup = 128;
constexpr int kWarps = kWarpgroup / 32;
constexpr int kTileM = 64;                              // the M of every wgmma
constexpr int kKeyTiles = kBlockN / kTileM;             // of Sᵀ, along the keys
constexpr int kColumnTiles = kHeadDimVPadded / kTileM;  // of Oᵀ, along the columns of V

// A thread's part of a warpgroup's accumulators, and what it keeps of its columns.
using Scores = float[kKeyTiles][kRows / 2];
using Output = float[kColumnTiles][kRows / 2];
using Statistics = float[kRows / 4];

using Barrier = cutlass::arch::ClusterBarrier;
using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

__host__ __device__ constexpr int blocks_of(int n, int size) {
  return (n + size - 1) / size;
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

// Of a row in a split: x, the score that P is relative to; y, the sum of P.
using Share = float2;

// A row that has seen nothing has no such score, one of what is no number none that is a number.
__device__ __forceinline__ Share share_of(float reference, float sum) {
  return {sum > 0.0f ? reference : sum == 0.0f ? -INFINITY : sum, sum};
}

struct SharedStorage {
  alignas(1024) Element ring[kStages][kBlockN * kHeadDimPadded];
  alignas(1024) Element q[kQStages][kRows * kHeadDimPadded];
  alignas(1024) Element p[2][kRows * kBlockN];  // keys side by side
  alignas(1024) float maxima[kWarps][kRows];
  float sums[kWarps][kRows];
  alignas(1024) TransactionBarrier full[kStages];
  Barrier empty[kStages];
  TransactionBarrier q_full[kQStages];
  Barrier q_empty[kQStages];
};
constexpr int kSharedBytes = sizeof(SharedStorage);
static_assert(kSharedBytes == 96256, "the ledger of shared memory");

struct Params {
  CUtensorMap q, k, v;
  const int32_t* seqused_k;  // (batch); may be null
  const int32_t* leftpad_k;  // (batch); may be null
  float* partials;           // (batch, splits, seqlen_q, heads, columns of V): sums of P V
  Share* shares;             // (batch, splits, seqlen_q, heads)
  Element* out;
  float* lse;  // may be null
  int64_t out_stride_batch, out_stride_seq, out_stride_head, lse_stride_batch, lse_stride_head;
  int batch, heads, kv_heads;
  int group;  // query heads of a KV head
  int seqlen_q, seqlen_k;
  int tile_positions;  // of queries, and their heads: kRows are most
  FastDivisor tile_heads;
  int q_bytes;          // of a tile's rows
  int split_units;      // units of work of a split: KV heads and tiles of rows
  int prefetched_keys;  // of a thread block's first unit, at most
  FastDivisor kv_heads_divisor, row_tiles, head_tiles, heads_divisor, seqlen_q_divisor;
  float scale;       // of S
  float scale_log2;  // times log2(e)
  int least_blocks;  // of keys, that a split has
  bool alone;        // no sequence has two splits: nothing is left to combine
  bool next_begins;  // the launch after that which combines, under the end of this one

  // Where a split's partial output of a row is.
  __device__ __forceinline__ int64_t partial(int batch, int split, int position, int head) const {
    return ((int64_t(batch) * kNumSplits + split) * seqlen_q + position) * heads + head;
  }

  // By how much one reference lies above another, in natural logarithm: that of a split which has
  // seen nothing, or no number, is so too. Large scores are subtracted before they are scaled: what
  // is small of their difference is exact.
  __device__ __forceinline__ float rise(float before, float reference) const {
    return reference == -INFINITY ? -INFINITY : (reference - before) * scale;
  }
};

__device__ __forceinline__ int lane() {
  return threadIdx.x % 32;
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const Pair pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
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

// ---- Units of work ---------------------------------------------------------------------------

// A sequence's keys: `length` rows of the cache from `first` on.
struct Sequence {
  int first, length;
};

// Lengths are the caller's: whatever they are, nothing outside of the cache is meant. They are not
// read through L1, which might have them from before the launch before this one ended.
__device__ __forceinline__ Sequence sequence_of(const Params& params, int batch) {
  const int end = params.seqused_k ? min(max(0, __ldcg(params.seqused_k + batch)), params.seqlen_k)
                                   : params.seqlen_k;
  const int first = params.leftpad_k ? max(0, __ldcg(params.leftpad_k + batch)) : 0;
  return {first, max(0, end - first)};  // neither is negative: the difference is an int
}

// How many keys a split of so many keys has, in whole blocks: a matter of the sequence's own length
// alone, and of the heads of a KV head. Few blocks are one split, which nothing has to be combined
// with.
__device__ __forceinline__ int split_keys(const Params& params, int length) {
  const int blocks = blocks_of(length, kBlockN);
  return (blocks <= kMostBlocks ? blocks
                                : max(blocks_of(blocks, kNumSplits), params.least_blocks)) *
         kBlockN;
}

__device__ __forceinline__ int splits_of(const Params& params, int length) {
  return length > 0 ? blocks_of(length, split_keys(params, length)) : 0;
}

// Every row of a sequence has its splits.
__device__ __forceinline__ int splits_of(const Params& params, int batch, int) {
  return splits_of(params, sequence_of(params, batch).length);
}

// Keys of one KV head, a split's or those of several from this one on, for some queries of its
// group of heads: rows with heads side by side.
struct Unit {
  int batch, kv_head, split;
  Sequence sequence;
  int first_key, last_key;  // counted in its sequence
  int first_position, first_head;
  int rows;  // of queries

  // Of a KV head's tiles of rows, this one.
  __device__ __forceinline__ void take_rows(const Params& params, int row_tile) {
    const int position_tile = params.head_tiles.divide(row_tile);
    const int group_head =
        (row_tile - position_tile * params.head_tiles.value) * params.tile_heads.value;
    first_position = position_tile * params.tile_positions;
    first_head = kv_head * params.group + group_head;
    rows = min(params.tile_heads.value, params.group - group_head) *
           min(params.tile_positions, params.seqlen_q - first_position);
  }
};

// Units by their number, dealt to thread blocks in turns. Those of a sequence follow each other, KV
// heads fastest, so that blocks that run at a time read neighbouring memory and every sequence is
// dealt to all SMs. Of 32 sequences those come first that are one split of several blocks, beside
// splits of others that have one: they take longest; and last the last splits, which may be short,
// of sequences that are alike.
struct Units {
  const Params& params;
  int window = 0;  // of 32 sequences, one for each lane: the first of them
  int before = 0;  // units of the sequences before
  Sequence own;    // the lane's
  int begin;       // units of the window before those of the lane's sequence, but for last splits,
  int own_begun;   // those,
  int own_last;    // units before those of its last split; all, if that does not come behind others
  int all_units;   // of the window

  __device__ __forceinline__ explicit Units(const Params& params) : params(params) { count(); }

  __device__ __forceinline__ int units_of(const Sequence& sequence) const {
    const int splits = params.alone ? sequence.length >= 0 : splits_of(params, sequence.length);
    return splits * params.split_units;
  }

  __device__ __forceinline__ void count() {
    const int batch = window + lane();
    own = batch < params.batch ? sequence_of(params, batch) : Sequence{0, -1};
    const int own_units = units_of(own);
    const int first_length = __shfl_sync(0xffffffffu, own.length, 0);
    // a long sequence's last split may not come behind others' short ones
    const bool alike = __all_sync(0xffffffffu, own.length < 0 || own.length == first_length);
    const bool has_last = alike && own_units > params.split_units;
    own_begun = has_last ? own_units - params.split_units : own_units;
    int ends = own_begun;  // of the lanes up to this one
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int others = __shfl_up_sync(0xffffffffu, ends, step);
      ends += lane() >= step ? others : 0;
    }
    const int all_begun = __shfl_sync(0xffffffffu, ends, 31);
    const bool is_long =
        !params.alone && own.length > kBlockN && own.length <= kMostBlocks * kBlockN;
    const uint32_t longs = __ballot_sync(0xffffffffu, is_long), lanes_before = (1u << lane()) - 1;
    all_units = all_begun + __popc(__ballot_sync(0xffffffffu, has_last)) * params.split_units;
    own_last = has_last ? all_begun + lane() * params.split_units : all_units;
    begin = __popc(longs & (is_long ? lanes_before : ~lanes_before)) * params.split_units +
            (is_long ? 0 : ends - own_begun);
  }

  // By all lanes of a warp, with numbers that rise; false: there is none of this number.
  __device__ __forceinline__ bool find(int number, Unit& unit) {
    while (number >= before + all_units) {
      before += all_units;
      window += 32;
      if (window >= params.batch) {
        return false;
      }
      count();
    }
    const int of_last = number - before - own_last;
    const bool is_last = of_last >= 0 && of_last < params.split_units;
    int rank = is_last ? own_begun + of_last : number - before - begin;
    const int owner =
        __ffs(__ballot_sync(0xffffffffu, is_last || (rank >= 0 && rank < own_begun))) - 1;
    rank = __shfl_sync(0xffffffffu, rank, owner);
    unit.batch = window + owner;
    unit.sequence.first = __shfl_sync(0xffffffffu, own.first, owner);
    unit.sequence.length = __shfl_sync(0xffffffffu, own.length, owner);
    const int rest = params.kv_heads_divisor.divide(rank);
    unit.kv_head = rank - rest * params.kv_heads;
    unit.split = params.row_tiles.divide(rest);
    const int row_tile = rest - unit.split * params.row_tiles.value;
    const int keys = split_keys(params, unit.sequence.length);
    unit.first_key = unit.split * keys;
    unit.last_key = min(unit.first_key + keys, unit.sequence.length);
    unit.take_rows(params, row_tile);
    return true;
  }
};

// How many queries there are, and keys in a sequence.
struct Lengths {
  int seqlen_q, seqlen_k;
};

// The keys first … last - 1 that a row sees; none where last <= first. Both ends rise from row to
// row.
struct Keys {
  int first, last;
};

__host__ __device__ __forceinline__ Keys seen_by(const Lengths& lengths, int row) {
  const int seqlen_q = lengths.seqlen_q, seqlen_k = lengths.seqlen_k;
  return {0, min(seqlen_k, row + seqlen_k - seqlen_q + 1)};
}

// What the launch before this one wrote can be seen from here on.
__device__ __forceinline__ void wait_for_launch_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The launch after this one may begin once all thread blocks have come here.
__device__ __forceinline__ void let_next_launch_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- Combining -------------------------------------------------------------------------------

// Each operation is rounded to nearest by itself. What is contracted or approximated would be other
// bits: on a CPU, or in another kernel.
__host__ __device__ __forceinline__ float times(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

__host__ __device__ __forceinline__ float plus(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

__host__ __device__ __forceinline__ uint32_t bits_of(float number) {
  uint32_t bits;
  memcpy(&bits, &number, sizeof(bits));
  return bits;
}

__host__ __device__ __forceinline__ float from_bits(uint32_t bits) {
  float number;
  memcpy(&number, &bits, sizeof(number));
  return number;
}

// exp(-|d|): 2^n times a polynomial of what is left of the exponent, |f| <= 1/2.
__host__ __device__ __forceinline__ float exp_below(float d) {
  constexpr float kTerms[] = {0.6931471824645996f,    0.24022647738456726f,
                              0.055503323674201965f,  0.00961843691766262f,
                              0.0013398875016719103f, 0.00015353360504377633f};
  constexpr int kLast = sizeof(kTerms) / sizeof(float) - 1;
  const float x = times(fabsf(d), -1.4426950216293335f);
  const float y = plus(x, 12582912.0f);  // n stands in its lowest bits
  const float f = plus(x, -plus(y, -12582912.0f));
  float p = kTerms[kLast];
#pragma unroll
  for (int i = kLast - 1; i >= 0; --i) {
    p = plus(times(p, f), kTerms[i]);
  }
  p = times(plus(times(p, f), 1.0f), from_bits((bits_of(y) + 127) << 23));
  return x < -125.0f ? 0.0f : p;
}

// ln(s) for s >= 1: of its exponent, and a polynomial of its mantissa between the roots of 1/2 and
// of 2.
__host__ __device__ __forceinline__ float log_above(float s) {
  constexpr float kTerms[] = {-0.4999998211860657f,  0.3333393335342407f,   -0.25002583861351013f,
                              0.19963476061820984f,  -0.16551794111728668f, 0.14883700013160706f,
                              -0.14426842331886292f, 0.0897943452000618f};
  constexpr int kLast = sizeof(kTerms) / sizeof(float) - 1;
  const int exponent = int(bits_of(s) - 1060439283) >> 23;
  const float t = plus(times(s, from_bits(uint32_t(127 - exponent) << 23)), -1.0f);
  float q = kTerms[kLast];
#pragma unroll
  for (int i = kLast - 1; i >= 0; --i) {
    q = plus(times(q, t), kTerms[i]);
  }
  return plus(times(float(exponent), 0.6931471824645996f), plus(t, times(times(t, t), q)));
}

// What a split changes: what is summed so far is multiplied by `old`, the split's own output by
// `own`. One of the two is 1, the other a weight below: lanes hand it on with its sign set where it
// is `old`.
__host__ __device__ __forceinline__ float weigh(float lse, float maximum) {
  const float d = plus(lse, -maximum);
  const float weight = exp_below(d);
  return lse == -INFINITY ? 0.0f : d > 0.0f ? -weight : weight;
}

__host__ __device__ __forceinline__ float old_weight(float weight) {
  return int(bits_of(weight)) < 0 ? -weight : 1.0f;
}

__host__ __device__ __forceinline__ float own_weight(float weight) {
  return int(bits_of(weight)) < 0 ? 1.0f : weight;
}

__host__ __device__ __forceinline__ float accumulate(float sum, float number, float old,
                                                     float own) {
  return plus(times(sum, old), times(number, own));
}

// ---- Tensor cores ----------------------------------------------------------------------------

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

// From the descriptor of a tile to that of its k-th row.
__device__ constexpr uint32_t row_offset(int k) {
  return k * kSlab * sizeof(Element) >> 4;
}

// Sᵀ = or += K Qᵀ, both as they lie.
template <bool accumulate>
__device__ __forceinline__ void wgmma_scores(float (&c)[8], Descriptor a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7 }, "
      "%8, %9, %10, 1, 1, 0, 0;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7])
      : "l"(a.bits()), "l"(b.bits()), "n"(accumulate ? 1 : 0));
}

// Oᵀ += Vᵀ Pᵀ, V as it lies.
template <bool accumulate>
__device__ __forceinline__ void wgmma_output(float (&c)[8], Descriptor a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7 }, "
      "%8, %9, %10, 1, 1, 1, 0;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7])
      : "l"(a.bits()), "l"(b.bits()), "n"(accumulate ? 1 : 0));
}

// ---- Loading ---------------------------------------------------------------------------------

// Copies tiles from global to shared memory, by one thread of a warp that finds units together.
struct Producer {
  const Params& params;
  SharedStorage& shared;
  RingPosition<kStages> tile;
  RingPosition<kQStages> q;

  // The first keys, by lengths that the launch before this one may change: only less will be there.
  __device__ __forceinline__ void prefetch_first() {
    Units units(params);
    Unit unit;
    if (units.find(blockIdx.x, unit) && lane() == 0) {
      prefetch(unit);
    }
  }

  __device__ __forceinline__ void run() {
    Units units(params);
    Unit unit;
    // back and forth: who has one of the first units, which take longest, has none of the last
    int step = 2 * int(gridDim.x - blockIdx.x) - 1;
    for (int number = blockIdx.x; units.find(number, unit);
         number += step, step = 2 * int(gridDim.x) - step) {
      take(unit);
    }
  }

  // The next buffer of the ring becomes a block of K or V. Who has read it needs it no more, but
  // lines of L2 may end with the next head's rows. Rows past the cache and columns past the head
  // dim are filled with zeros.
  template <int columns>
  __device__ __forceinline__ void load(const CUtensorMap& map, const Unit& unit, int key) {
    TransactionBarrier& full = shared.full[tile.stage];
    shared.empty[tile.stage].wait(tile.phase ^ 1);
    full.arrive_and_expect_tx(kBlockN * columns * sizeof(Element));
#pragma unroll
    for (int column = 0; column < columns; column += kSlab) {
      cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&full),
                                   static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST),
                                   shared.ring[tile.stage] + column * kBlockN, column,
                                   unit.sequence.first + key, unit.kv_head, unit.batch);
    }
    tile.advance();
  }

  __device__ __forceinline__ void load_k(const Unit& unit, int key) {
    load<kHeadDimPadded>(params.k, unit, key);
  }
  __device__ __forceinline__ void load_v(const Unit& unit, int key) {
    load<kHeadDimVPadded>(params.v, unit, key);
  }

  // Rows of queries: a box has its heads side by side. It may reach into the next group's.
  __device__ __forceinline__ void load_q(const Unit& unit) {
    TransactionBarrier& full = shared.q_full[q.stage];
    shared.q_empty[q.stage].wait(q.phase ^ 1);
    full.arrive_and_expect_tx(params.q_bytes);
#pragma unroll
    for (int column = 0; column < kHeadDimPadded; column += kSlab) {
      cute::SM90_TMA_LOAD_4D::copy(&params.q, reinterpret_cast<uint64_t*>(&full),
                                   static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST),
                                   shared.q[q.stage] + column * kRows, column, unit.first_head,
                                   unit.first_position, unit.batch);
    }
    q.advance();
  }

  // All of a unit, by a warp.
  __device__ __forceinline__ void take(const Unit& unit) {
    if (lane() == 0) {
      for (int key = unit.first_key; key < unit.last_key; key += kBlockN) {
        load_k(unit, key);
        if (key == unit.first_key) {  // memory that takes longer to answer was asked first
          load_q(unit);
        }
        load_v(unit, key);
      }
    }
    __syncwarp();
  }

  template <int columns>
  __device__ __forceinline__ void prefetch(const CUtensorMap& map, const Unit& unit, int key) {
#pragma unroll
    for (int column = 0; column < columns; column += kSlab) {
      cute::SM90_TMA_LOAD_4D::PREFETCH::copy(&map, column, unit.sequence.first + key, unit.kv_head,
                                             unit.batch);
    }
  }

  // Asks for first keys and values in the L2 cache, while the launch before this one ends. That may
  // change them, which L2 then knows.
  __device__ __forceinline__ void prefetch(const Unit& unit) {
    const int last_key = min(unit.last_key, unit.first_key + params.prefetched_keys);
    for (int key = unit.first_key; key < last_key; key += kBlockN) {
      prefetch<kHeadDimPadded>(params.k, unit, key);
      prefetch<kHeadDimVPadded>(params.v, unit, key);
    }
  }
};

// ---- Computing -------------------------------------------------------------------------------

// A warp has 16 of an accumulator's 64 rows, from warp_row() on.
__device__ __forceinline__ int warp_row() {
  return threadIdx.x % kWarpgroup / 32 * 16;
}

// A thread has two of them, thread_row() and eight below: element i is in row i / 2 % 2 and in
// column i / 4 * 8 + i % 2, counted from 2 * (lane % 4). Four lanes share a row.
__device__ __forceinline__ int thread_row() {
  return warp_row() + lane() / 4;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Which column of an accumulator this one of a thread's columns is.
__device__ __forceinline__ int column_at(int j) {
  return j / 2 * 8 + lane() % 4 * 2 + j % 2;
}

// Which row of all accumulators, tile after tile, the i-th number is in that a thread has of each
// of its columns.
__device__ __forceinline__ int row_at(int i) {
  return i / 2 * kTileM + thread_row() + i % 2 * 8;
}

// And which element of the accumulator i / 2 that number is.
__device__ constexpr int element_at(int i, int j) {
  return j / 2 * 4 + i % 2 * 2 + j % 2;
}

// Stores two 8x8 matrices of 16-bit elements, 16 rows of an accumulator by 8 columns, transposed at
// `address`, which each lane gives for column lane % 8 and the rows from lane / 8 % 2 * 8 on.
__device__ __forceinline__ void store_transposed(void* address, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], { %1, %2 };" ::"r"(
                   cute::cast_smem_ptr_to_uint(address)),
               "r"(a), "r"(b)
               : "memory");
}

// Hardware barriers, by number; 0 is __syncthreads.
enum NamedBarrier { kConsumer = 1 };

__device__ __forceinline__ void meet() {
  asm volatile("bar.sync %0, %1;" ::"r"(int(kConsumer)), "r"(kWarpgroup) : "memory");
}

// Whether any thread of the warpgroup says so, once all have come.
__device__ __forceinline__ bool meet_and_vote(bool vote) {
  int any;
  asm volatile(
      "{ .reg .pred said, any; setp.ne.s32 said, %3, 0; bar.red.or.pred any, %1, %2, said; selp.s32 %0, 1, 0, any; }"
      : "=r"(any)
      : "r"(int(kConsumer)), "r"(kWarpgroup), "r"(int(vote))
      : "memory");
  return any;
}

// Keys lie along the rows of Sᵀ, 16 to a warp, columns of V along those of Oᵀ; in both the columns
// are rows of queries, of which a thread has the same kRows / 4.
struct Consumer {
  const Params& params;
  SharedStorage& shared;
  RingPosition<kStages> tile;
  RingPosition<kQStages> q;
  int p = 0;  // which of its buffers is next
  Output o;
  Statistics reference;  // score that P is relative to: none is kRescaleThreshold above it
  Statistics sum;        // of P, of this thread's keys

  // All keys of a split.
  __device__ __forceinline__ void take(const Unit& unit) {
    const Keys seen = seen_by_all(unit);
    begin(unit);
    if (unit.first_key <
        unit.last_key) {  // a sequence that has none is a unit where nobody else writes its output
      shared.q_full[q.stage].wait(q.phase);
      Scores s;
      first_scores(s);
      int key = unit.first_key;
      for (; key + kBlockN < unit.last_key; key += kBlockN) {
        step(unit, seen, key, s);
        finish_scores(s);
      }
      last_step(unit, seen, key, s);
    } else {
      meet();  // nobody still reads the sums of the unit before
    }
    finish(unit);
  }

  __device__ __forceinline__ void run() {
    Units units(params);
    Unit unit;
    // back and forth: who has one of the first units, which take longest, has none of the last
    int step = 2 * int(gridDim.x - blockIdx.x) - 1;
    for (int number = blockIdx.x; units.find(number, unit);
         number += step, step = 2 * int(gridDim.x) - step) {
      take(unit);
    }
  }

  // The keys that all queries of a unit see.
  __device__ __forceinline__ Keys seen_by_all(const Unit& unit) {
    const Keys of_first =
        seen_by(Lengths{params.seqlen_q, unit.sequence.length}, unit.first_position);
    const int last_position = min(unit.first_position + params.tile_positions, params.seqlen_q) - 1;
    const Keys of_last = seen_by(Lengths{params.seqlen_q, unit.sequence.length}, last_position);
    return {of_last.first, of_first.last};
  }

  // Takes off the scores of keys that a query does not see, from `key` on.
  __device__ __forceinline__ void mask(const Unit& unit, int key, Scores& s) {
#pragma unroll
    for (int j = 0; j < kRows / 4; ++j) {
      const int position = unit.first_position + params.tile_heads.divide(column_at(j));
      const Keys seen = seen_by(Lengths{params.seqlen_q, unit.sequence.length}, position);
#pragma unroll
      for (int i = 0; i < 2 * kKeyTiles; ++i) {
        const int own = key + row_at(i);
        if (own >= seen.last) {
          s[i / 2][element_at(i, j)] = -INFINITY;
        }
      }
    }
  }

  // Whether a column is a row of the unit.
  __device__ __forceinline__ bool takes(const Unit& unit, int j) const {
    return column_at(j) < unit.rows;
  }

  // None yet.
  __device__ __forceinline__ float first_reference(const Unit&, int) const { return -INFINITY; }

  // The largest score that this thread has in one of its columns.
  __device__ __forceinline__ float largest(const Scores& s, int j) {
    float maximum = -INFINITY;
#pragma unroll
    for (int i = 0; i < 2 * kKeyTiles; ++i) {
      maximum = fmaxf(maximum, s[i / 2][element_at(i, j)]);
    }
    return maximum;
  }

  // How far a score lies above a reference, log2 units. Subtracted first: scores may be large, and
  // their difference is exact where it matters.
  __device__ __forceinline__ float above(float score, float reference) const {
    return (score - reference) * params.scale_log2;
  }

  // Whether a score with this maximum needs another reference.
  __device__ __forceinline__ bool outgrows(float maximum, int j) {
    return above(maximum, reference[j]) > kRescaleThreshold;
  }

  __device__ __forceinline__ bool outgrown(const Scores& s) {
    bool any = false;
#pragma unroll
    for (int j = 0; j < kRows / 4; ++j) {
      any |= outgrows(largest(s, j), j);
    }
    return any;
  }

  // P into shared memory; `total` grows by it. Where no key has been seen there is no reference
  // yet.
  __device__ __forceinline__ void exponentiate(const Scores& s, Statistics& total) {
    const int turn = lane() % 8, part = threadIdx.x / 32 * 2 + lane() / 8 % 2;
    char* const to =
        reinterpret_cast<char*>(shared.p[p]) + turn * kSlab * sizeof(Element) + (part ^ turn) * 16;
#pragma unroll
    for (int group = 0; group < kRows / 8; ++group) {
      float offset[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float own = reference[2 * group + j];
        offset[j] = own == -INFINITY ? 0.0f : own;
      }
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) {
        float x[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          x[k] = exp2_approx(above(s[i][4 * group + k], offset[k % 2]));
          total[2 * group + k % 2] += x[k];
        }
        store_transposed(to + (i * kRows + group * 8) * kSlab * sizeof(Element), pack(x[0], x[1]),
                         pack(x[2], x[3]));
      }
    }
  }

  // Finds the exact maximum of each column; where it outgrows the reference it takes its place, and
  // what was summed follows. So a column's bits depend on its own scores alone.
  __device__ __forceinline__ void settle(const Scores& s) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < kRows / 4; ++j) {
      float maximum = largest(s, j);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, step));
      }
      if (lane() < 4) {
        shared.maxima[warp][column_at(j)] = maximum;
      }
    }
    meet();
#pragma unroll
    for (int j = 0; j < kRows / 4; ++j) {
      float maximum = -INFINITY;
#pragma unroll
      for (int other = 0; other < kWarps; ++other) {
        maximum = fmaxf(maximum, shared.maxima[other][column_at(j)]);
      }
      if (outgrows(maximum, j)) {
        const float factor = exp2_approx(above(reference[j], maximum));
        reference[j] = maximum;
        sum[j] *= factor;
#pragma unroll
        for (int i = 0; i < 2 * kColumnTiles; ++i) {
          o[i / 2][element_at(i, j)] *= factor;
        }
      }
    }
  }

  // Whether references come from keys before this one.
  __device__ __forceinline__ bool has_references(const Unit& unit, int key) const {
    return key > unit.first_key;
  }

  // P of a step's scores. Everybody counts on the reference of the steps before; if it has been
  // outgrown, they do it again.
  __device__ __forceinline__ void softmax(const Unit& unit, int key, Scores& s) {
    Statistics added = {};
    bool again = true;
    if (has_references(unit, key)) {
      exponentiate(s, added);
      cutlass::arch::fence_view_async_shared();
      again = meet_and_vote(outgrown(s));
    }
    if (again) {
      settle(s);
#pragma unroll
      for (int j = 0; j < kRows / 4; ++j) {
        added[j] = 0.0f;
      }
      exponentiate(s, added);
      cutlass::arch::fence_view_async_shared();
      meet();
    }
#pragma unroll
    for (int j = 0; j < kRows / 4; ++j) {
      sum[j] += added[j];
    }
  }

  // One arrival per warp, since wgmma completes per warp.
  __device__ __forceinline__ void arrive(Barrier& barrier) {
    if (lane() == 0) {
      barrier.arrive();
    }
  }

  // Issues Sᵀ = K Qᵀ.
  __device__ __forceinline__ void issue_scores(Scores& s) {
    const Descriptor keys = descriptor<kSlab>(shared.ring[tile.stage], kDescriptor);
    const Descriptor queries = descriptor<kSlab>(shared.q[q.stage], kDescriptor);
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      fence_operand(s[i]);
    }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      const Descriptor own = keys + row_offset(i * kTileM);
      wgmma_scores<false>(s[i], own, queries);
#pragma unroll
      for (int column = kStepK; column < kHeadDim; column += kStepK) {
        wgmma_scores<true>(s[i], own + column_offset<kBlockN, kSlab>(column),
                           queries + column_offset<kRows, kSlab>(column));
      }
    }
    wgmma_commit();
  }

  // Issues Oᵀ += Vᵀ Pᵀ.
  __device__ __forceinline__ void issue_output(const Element* values) {
    const Descriptor a = descriptor<kSlab>(values, kDescriptor);
    const Descriptor b = descriptor<kSlab>(shared.p[p], kDescriptor);
    fence_output();
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
#pragma unroll
      for (int key = 0; key < kBlockN; key += kStepK) {
        wgmma_output<true>(o[i], a + (column_offset<kBlockN, kSlab>(i * kTileM) + row_offset(key)),
                           b + column_offset<kRows, kSlab>(key));
      }
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void fence_output() {
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
      fence_operand(o[i]);
    }
  }

  // The next buffer of the ring has K: its scores, and the product before them, are there at the
  // end.
  __device__ __forceinline__ void finish_scores(Scores& s) {
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      fence_operand(s[i]);
    }
    arrive(shared.empty[tile.stage]);
    tile.advance();
  }

  // Makes zeros of what lies behind the last of `keys` rows of V: P is 0 there, but it may be no
  // number.
  __device__ __forceinline__ void clear_values(Element* values, int keys) {
    constexpr int kParts = kSlab * sizeof(Element) / sizeof(uint4);  // of a slab's row
    uint4* const parts = reinterpret_cast<uint4*>(values);
    for (int i = keys * kParts + threadIdx.x; i < kBlockN * kParts; i += kWarpgroup) {
#pragma unroll
      for (int slab = 0; slab < kHeadDimVPadded / kSlab; ++slab) {
        parts[slab * kBlockN * kParts + i] = make_uint4(0, 0, 0, 0);
      }
    }
  }

  __device__ __forceinline__ void begin(const Unit& unit) {
#pragma unroll
    for (int j = 0; j < kRows / 4; ++j) {
      // what nothing outgrows: no row that is none has a say
      reference[j] = takes(unit, j) ? first_reference(unit, j) : INFINITY;
      sum[j] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
#pragma unroll
      for (int j = 0; j < kRows / 2; ++j) {
        o[i][j] = 0.0f;
      }
    }
  }

  // P of the keys from `key` on, in shared memory; the next buffer of the ring has their V.
  __device__ __forceinline__ void weigh_keys(const Unit& unit, const Keys& seen_by_all, int key,
                                             Scores& s) {
    if (key < seen_by_all.first || key + kBlockN > seen_by_all.last) {
      mask(unit, key, s);
      if (key + kBlockN > unit.sequence.length) {
        shared.full[tile.stage].wait(tile.phase);
        clear_values(shared.ring[tile.stage], unit.sequence.length - key);
      }
    }
    p ^= 1;
    softmax(unit, key, s);
    shared.full[tile.stage].wait(tile.phase);
  }

  // What is issued in a step is waited for in the same, else ptxas waits for each product.
  __device__ __forceinline__ void first_scores(Scores& s) {
    shared.full[tile.stage].wait(tile.phase);
    issue_scores(s);
    finish_scores(s);
  }

  // The product of the keys from `key` on; scores of the next ones are on their way at the end.
  __device__ __forceinline__ void step(const Unit& unit, const Keys& seen_by_all, int key,
                                       Scores& s) {
    weigh_keys(unit, seen_by_all, key, s);
    const int values = tile.stage;
    issue_output(shared.ring[values]);
    tile.advance();
    shared.full[tile.stage].wait(tile.phase);
    issue_scores(s);
    wgmma_wait<1>();
    fence_output();
    arrive(shared.empty[values]);
  }

  // The product of a unit's last keys, from `key` on.
  __device__ __forceinline__ void last_step(const Unit& unit, const Keys& seen_by_all, int key,
                                            Scores& s) {
    arrive(shared.q_empty[q.stage]);
    q.advance();
    weigh_keys(unit, seen_by_all, key, s);
    issue_output(shared.ring[tile.stage]);
    wgmma_wait<0>();
    fence_output();
    arrive(shared.empty[tile.stage]);
    tile.advance();
  }

  // The sum of P of a row, by all threads that have a part of it.
  __device__ __forceinline__ void add_up_sums() {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < kRows / 4; ++j) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], step);
      }
      if (lane() < 4) {
        shared.sums[warp][column_at(j)] = sum[j];
      }
    }
    meet();
  }

  // Calls hand_on(j, total, position, head) for each of this thread's columns that is a row of the
  // unit, with the sum of its P.
  template <class HandOn>
  __device__ __forceinline__ void for_each_row(const Unit& unit, HandOn hand_on) {
    add_up_sums();
#pragma unroll
    for (int j = 0; j < kRows / 4; ++j) {
      if (!takes(unit, j)) {
        continue;
      }
      const int row = column_at(j);
      float total = 0.0f;
#pragma unroll
      for (int other = 0; other < kWarps; ++other) {
        total += shared.sums[other][row];
      }
      const int position = params.tile_heads.divide(row);
      const int head = row - position * params.tile_heads.value;
      hand_on(j, total, unit.first_position + position, unit.first_head + head);
    }
  }

  // Calls store(column, number) for what this thread has of an output's row.
  template <class Store>
  __device__ __forceinline__ void for_each_number(Output& output, int j, Store store) {
#pragma unroll
    for (int i = 0; i < 2 * kColumnTiles; ++i) {
      store(row_at(i), output[i / 2][element_at(i, j)]);
    }
  }

  // Hands a split's output of a row on.
  __device__ __forceinline__ void store_partial(int j, int64_t index) {
    float* const to = params.partials + index * kHeadDimV;
    for_each_number(o, j, [&](int column, float number) { __stcg(to + column, number); });
  }

  // Hands on what a row of a split is relative to, with its sum.
  __device__ __forceinline__ void store_share(int j, int64_t index, float total) {
    if (thread_row() == 0) {
      const Share share = share_of(reference[j], total);
      __stcg(params.shares + index, share);
    }
  }

  // Stores one of this thread's columns as the output of a row that has one split: what combining
  // it alone gives, where it is added to nothing.
  __device__ __forceinline__ void store_output(const Unit& unit, int j, float total, int position,
                                               int head) {
    const float inverse = total == 0.0f ? 0.0f : __frcp_rn(total);
    Element* const out = params.out + unit.batch * params.out_stride_batch +
                         position * params.out_stride_seq + head * params.out_stride_head;
    for_each_number(o, j, [&](int column, float number) {
      // of no key it is 0, even beside a V that is not finite
      out[column] =
          __floats2half2_rn(total == 0.0f ? 0.0f : times(plus(number, 0.0f), inverse), 0.0f).x;
    });
    if (thread_row() == 0 && params.lse) {
      params.lse[unit.batch * params.lse_stride_batch + head * params.lse_stride_head + position] =
          plus(times(fmaxf(-INFINITY, share_of(reference[j], total).x), params.scale),
               log_above(total));
    }
  }

  // Hands the split's output on: where a sequence has no other, as its output.
  __device__ __forceinline__ void finish(const Unit& unit) {
    const bool alone = unit.last_key - unit.first_key == unit.sequence.length;
    for_each_row(unit, [&](int j, float total, int position, int head) {
      if (alone) {
        store_output(unit, j, total, position, head);
        return;
      }
      const int64_t index = params.partial(unit.batch, unit.split, position, head);
      store_partial(j, index);
      store_share(j, index, total);
    });
  }
};

// ---- The kernel ------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads, kBlocks) decode(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);

  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&params.k, &params.v, &params.q}) {
      cute::prefetch_tma_descriptor(map);
    }
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(1);
      shared.empty[stage].init(kWarps);
    }
    for (int stage = 0; stage < kQStages; ++stage) {
      shared.q_full[stage].init(1);
      shared.q_empty[stage].init(kWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // known to be uniform
  if (warp == kPrefetchWarp) {
    Producer{params, shared}.prefetch_first();
  }

  wait_for_launch_before();
  let_next_launch_begin();

  if (warp == kWarps) {
    Producer{params, shared}.run();
  } else {
    Consumer{params, shared}.run();
  }
}

// What an output is, of a sum of P V and one over the sum of P.
__device__ __forceinline__ float average(float total, float inverse) {
  return times(total, inverse);
}

// ---- Combining splits ------------------------------------------------------------------------

constexpr int kCombineLanes = 64;  // that share a row, two columns each
constexpr int kCombineThreads = 128;
constexpr int kCombineRows = kCombineThreads / kCombineLanes;  // per thread block
constexpr int kWindow = 8;  // splits that are combined while as many are on their way

constexpr int kWeighed =
    kCombineLanes < 32 ? kCombineLanes : 32;  // splits whose weights lanes work out at a time

// Splits of a row, as one lane has them: its own columns.
struct Window {
  float2 numbers[kWindow];
};

// Combines the splits of a row in their order. Heads are neighbours in memory, so they are
// neighbours here.
__global__ void __launch_bounds__(kCombineThreads)
    combine_partial_outputs(const __grid_constant__ Params params) {
  const int row = int(blockIdx.x) * kCombineRows + int(threadIdx.x) / kCombineLanes;
  const int flat = params.heads_divisor.divide(row);
  const int head = row - flat * params.heads;
  const int batch = params.seqlen_q_divisor.divide(flat);
  const int position = flat - batch * params.seqlen_q;
  const bool there = batch < params.batch;
  const int column = threadIdx.x % kCombineLanes * 2;

  // The launch before this one, whose blocks have all begun, had waited for whoever wrote the
  // lengths. A thread block has written the output of a row that has one split.
  const int of_sequence = there ? splits_of(params, batch, position) : 0;
  const int splits = of_sequence == 1 ? 0 : of_sequence;
  const int most = __reduce_max_sync(0xffffffffu, splits);       // of the rows of a warp
  const int64_t step = int64_t(params.seqlen_q) * params.heads;  // from split to split
  const int64_t first = params.partial(batch, 0, position, head);
  if (params.next_begins) {
    let_next_launch_begin();
  }
  const float* from =
      params.partials + first * kHeadDimV + column;  // where the next window's numbers begin
  const Share* const shares = params.shares + first;
  const int weighed =
      threadIdx.x % kWeighed;  // which of as many splits this lane works the weight out of
  const int64_t row_step = step * kHeadDimV;
  int left = splits;
  const auto load_share = [&](int begin) {
    return begin + weighed < splits ? __ldcg(shares + (begin + weighed) * step)
                                    : make_float2(-INFINITY, 0.0f);
  };
  const auto load = [&](Window& window) {
#pragma unroll
    for (int i = 0; i < kWindow; ++i) {
      window.numbers[i] =
          i < left ? __ldcg(reinterpret_cast<const float2*>(from)) : make_float2(0.0f, 0.0f);
      from += row_step;
    }
    left -= kWindow;
  };
  wait_for_launch_before();
  let_next_launch_begin();

  float reference = -INFINITY, sum = 0.0f, total[2] = {};

  Share share = load_share(0);
  Window window;
  load(window);
#pragma unroll 1
  for (int weighed_from = 0; weighed_from < most; weighed_from += kWeighed) {
    const Share next_share = load_share(weighed_from + kWeighed);
    float so_far = share.x;  // the largest of this lane's and those before it
#pragma unroll
    for (int lanes = 1; lanes < kWeighed; lanes *= 2) {
      so_far = fmaxf(so_far, __shfl_up_sync(0xffffffffu, so_far, lanes, kWeighed));
    }
    const float before = __shfl_up_sync(0xffffffffu, so_far, 1, kWeighed);
    const float weight =
        weigh(params.rise(weighed == 0 ? reference : fmaxf(reference, before), share.x), 0.0f);
    const float weighed_sum = times(share.y, own_weight(weight));
    reference = fmaxf(reference, __shfl_sync(0xffffffffu, so_far, kWeighed - 1, kWeighed));
    const int end = min(kWeighed, most - weighed_from);
#pragma unroll 1
    for (int begin = 0; begin < end; begin += kWindow) {
      Window next;
      load(next);
#pragma unroll
      for (int i = 0; i < kWindow; ++i) {
        const float of_split = __shfl_sync(0xffffffffu, weight, begin + i, kWeighed);
        const float old = old_weight(of_split), own = own_weight(of_split);
        total[0] = accumulate(total[0], window.numbers[i].x, old, own);
        total[1] = accumulate(total[1], window.numbers[i].y, old, own);
        sum = plus(times(sum, old), __shfl_sync(0xffffffffu, weighed_sum, begin + i, kWeighed));
      }
      window = next;
    }
    share = next_share;
  }
  if (!there || of_sequence == 1) {
    return;
  }

  if (sum == 0.0f) {
    total[0] = total[1] = 0.0f;  // of no key, even beside a V that is not finite
  }
  const float inverse = sum == 0.0f ? 0.0f : __frcp_rn(sum);
  Element* const out = params.out + batch * params.out_stride_batch +
                       position * params.out_stride_seq + head * params.out_stride_head + column;
  __stcg(reinterpret_cast<uint32_t*>(out),
         pack(average(total[0], inverse), average(total[1], inverse)));
  if (column == 0 && params.lse) {
    params.lse[batch * params.lse_stride_batch + head * params.lse_stride_head + position] =
        plus(times(reference, params.scale), log_above(sum));
  }
}

}  // namespace fagen_dec_fp16_d128_causal_r16n64_kernel

// ---- The C interface -------------------------------------------------------------------------

#ifndef FAGEN_DECODE_ARGS
#define FAGEN_DECODE_ARGS 1

extern "C" {

// One call of a kernel of kind decode: the same struct for all of them. Strides are in elements; a
// dimension without one is contiguous.
struct FagenDecodeArgs {
  uint32_t struct_bytes;  // sizeof(FagenDecodeArgs)
  uint32_t version;       // 1: callers built for another are recognised
  void* workspace;  // from a multiple of 16 bytes on as large as fagen_<slug>_workspace says; null
                    // where that is nothing
  int64_t workspace_bytes;  // how large it is
  const void* q;            // fp16 (batch, seqlen_q, heads, 128)
  const void* k;            // fp16 (batch, seqlen_k, kv_heads, 128): what no query sees is not used
  const void* v;            // fp16 (batch, seqlen_k, kv_heads, 128): likewise
  const void* seqused_k;    // int32 (batch): where each sequence's keys end; null: at seqlen_k
  const void* leftpad_k;    // int32 (batch): where each sequence's keys begin; null: at 0
  void* out;                // fp16 (batch, seqlen_q, heads, 128): zeros without a key
  void* lse;  // fp32 (batch, heads, seqlen_q): log-sum-exp, natural logarithm; minus infinity in a
              // row that sees no key; null if not wanted
  int64_t q_stride_batch, q_stride_head, q_stride_seq;
  int64_t k_stride_batch, k_stride_head, k_stride_seq;
  int64_t v_stride_batch, v_stride_head, v_stride_seq;
  int64_t out_stride_batch, out_stride_head, out_stride_seq;
  int64_t lse_stride_batch, lse_stride_head;
  int32_t batch, heads, kv_heads, seqlen_q, seqlen_k;
  float scale;  // of q kᵀ before the softmax; finite and positive, 1e+08 at most
};

}  // extern "C"

#elif FAGEN_DECODE_ARGS != 1
#error "kernels of kind decode of two versions of fagen in one translation unit"
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
int fagen_dec_fp16_d128_causal_r16n64(const struct FagenDecodeArgs* args, void* stream);
// How many bytes of workspace a call of these sizes needs; -1 where args is null, or a call of such
// sizes is refused.
int64_t fagen_dec_fp16_d128_causal_r16n64_workspace(const struct FagenDecodeArgs* args);
const char* fagen_dec_fp16_d128_causal_r16n64_message(int status);
const struct FagenKernelInfo* fagen_dec_fp16_d128_causal_r16n64_info(void);

}  // extern "C"

// ---- The host's side -------------------------------------------------------------------------

#include "fagen_host.h"
#if FAGEN_HOST_H != 0xa95921b9
#error "the fagen_host.h beside this kernel is that of another version of fagen"
#endif

namespace fagen_dec_fp16_d128_causal_r16n64_host {

using namespace fagen_dec_fp16_d128_causal_r16n64_kernel;
using namespace fagen_host;
using fagen_host::ceil_div;  // of 64 bits: not what a kernel calls so

// What calls end with, by Status.
constexpr const char* kMessages[] = {
    "launched",
    "struct_bytes or version is that of another FagenDecodeArgs",
    "a size is negative or too large",
    "heads must be a multiple of kv_heads",
    "there are 2^30 rows of splits or more",
    "scale must be finite and positive, scale 1e+08 at most",
    "a tensor is given that cannot be",
    "a tensor that is needed is null",
    "a tensor does not begin at a multiple of 16 bytes (seqused_k: 4, leftpad_k: 4, lse: 4)",
    "a stride is negative, too large, or no multiple of 16 bytes",
    "elements of an output (out, lse) overlap: a stride is 0 or too small",
    "the workspace is null, too small, or does not begin at a multiple of 16 bytes",
    "the current device is not a Hopper GPU (compute capability 9.0)",
    "the CUDA driver is missing, or too old for tensor maps",
    "the CUDA driver refused to describe a tensor for TMA",
    "the kernel could not be launched",
};

// Whether sizes go together, and are not too large.
Status check_sizes(const FagenDecodeArgs& a) {
  for (const int size : {a.batch, a.heads, a.kv_heads, a.seqlen_q, a.seqlen_k}) {
    if (size < 0 || size > 1073741824) {
      return kBadSize;
    }
  }
  if (a.kv_heads == 0 ? a.heads != 0 : a.heads % a.kv_heads != 0) {
    return kBadRatio;
  }
  if (double(a.seqlen_q) * double(a.heads) * double(a.batch) * double(16) >= 1 << 30) {
    return kTooMany;
  }
  return kOk;
}

// Of a call whose sizes are checked, which has fewer than 2^30 of what each record is of.
int64_t workspace_bytes([[maybe_unused]] const FagenDecodeArgs& a) {
  return int64_t(8320) * a.seqlen_q * a.heads * a.batch;
}

Status check(const FagenDecodeArgs& a) {
  if (a.struct_bytes != sizeof(a) || a.version != FAGEN_DECODE_ARGS) {
    return kWrongStruct;
  }
  if (const Status status = check_sizes(a)) {
    return status;
  }
  if (!(a.scale > 0) || !std::isfinite(a.scale) || a.scale > 100000000.0) {
    return kBadScalar;
  }
  for (const Status status : {
           check_tensor(a.q, 2, true, false, kMostStride, 128,
                        {{a.batch, a.q_stride_batch},
                         {a.seqlen_q, a.q_stride_seq},
                         {a.heads, a.q_stride_head}}),
           check_tensor(a.k, 2, true, false, kMostStride, 128,
                        {{a.batch, a.k_stride_batch},
                         {a.seqlen_k, a.k_stride_seq},
                         {a.kv_heads, a.k_stride_head}}),
           check_tensor(a.v, 2, true, false, kMostStride, 128,
                        {{a.batch, a.v_stride_batch},
                         {a.seqlen_k, a.v_stride_seq},
                         {a.kv_heads, a.v_stride_head}}),
           !a.seqused_k ? kOk
                        : check_tensor(a.seqused_k, 4, false, false, kMostStride, a.batch, {}),
           !a.leftpad_k ? kOk
                        : check_tensor(a.leftpad_k, 4, false, false, kMostStride, a.batch, {}),
           check_tensor(a.out, 2, true, true, kMostStride, 128,
                        {{a.batch, a.out_stride_batch},
                         {a.seqlen_q, a.out_stride_seq},
                         {a.heads, a.out_stride_head}}),
           !a.lse ? kOk
                  : check_tensor(a.lse, 4, false, true, kMostStride, a.seqlen_q,
                                 {{a.batch, a.lse_stride_batch}, {a.heads, a.lse_stride_head}}),
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

Status launch(const FagenDecodeArgs& a, cudaStream_t stream) {
  if (a.batch == 0 || a.heads == 0 || a.seqlen_q == 0) {
    return kOk;
  }
  constexpr int shared_bytes = sizeof(SharedStorage);
  const int multiprocessors = prepare_device<decode>(shared_bytes);
  if (multiprocessors == 0) {
    return kNotHopper;
  }
  if (!encode_tiled()) {
    return kNoDriver;
  }

  Params params;
  params.seqused_k = static_cast<const int32_t*>(a.seqused_k);
  params.leftpad_k = static_cast<const int32_t*>(a.leftpad_k);
  params.partials = static_cast<float*>(a.workspace);
  params.out = static_cast<Element*>(a.out);
  params.lse = static_cast<float*>(a.lse);
  params.out_stride_batch = a.out_stride_batch;
  params.out_stride_seq = a.out_stride_seq;
  params.out_stride_head = a.out_stride_head;
  params.lse_stride_batch = a.lse_stride_batch;
  params.lse_stride_head = a.lse_stride_head;
  params.batch = a.batch;
  params.heads = a.heads;
  params.kv_heads = a.kv_heads;
  params.seqlen_q = a.seqlen_q;
  params.seqlen_k = a.seqlen_k;
  params.kv_heads_divisor = FastDivisor(a.kv_heads);
  params.heads_divisor = FastDivisor(a.heads);
  params.seqlen_q_divisor = FastDivisor(a.seqlen_q);
  params.scale = a.scale;
  params.scale_log2 = a.scale * 1.44269504089f;

  const int group = a.heads / a.kv_heads;
  const int tile_heads = std::min(group, kRows);
  const int tile_positions = std::clamp(kRows / group, 1, a.seqlen_q);
  const int head_tiles = blocks_of(group, tile_heads);
  const int row_tiles = head_tiles * blocks_of(a.seqlen_q, tile_positions);
  params.group = group;
  params.tile_positions = tile_positions;
  params.tile_heads = FastDivisor(tile_heads);
  params.least_blocks = std::clamp(group / kHeadsOfBlock, 1, kLongestLeast);
  params.q_bytes = tile_heads * tile_positions * kHeadDimPadded * int(sizeof(Element));
  params.split_units = row_tiles * a.kv_heads;
  params.row_tiles = FastDivisor(row_tiles);
  params.head_tiles = FastDivisor(head_tiles);

  // How many splits a sequence may have: what there is of keys is known here.
  const int blocks = blocks_of(params.seqlen_k, kBlockN);

  const int most_splits = blocks <= kMostBlocks
                              ? std::min(blocks, 1)
                              : std::min(kNumSplits, blocks_of(blocks, params.least_blocks));
  const int64_t units = int64_t(params.split_units) * a.batch * most_splits;

  params.alone = most_splits == 1;
  const int64_t grid = std::min<int64_t>(units, int64_t(multiprocessors) * kBlocks);

  // much of it delays the first loads, which few units do not make up for
  params.prefetched_keys = (units < 3 * grid ? 1 : kStages / 2) * kBlockN;

  const int64_t rows = int64_t(a.batch) * a.seqlen_q * a.heads;
  params.shares = reinterpret_cast<Share*>(params.partials + rows * kNumSplits * kHeadDimV);

  // Few thread blocks of the next call may come before these are combined: each has an SM of its
  // own. Of more, some SMs would have two, and others none.
  params.next_begins = 2 * grid <= multiprocessors;

  const Tensor q{.data = a.q,
                 .sizes = {kHeadDim, a.heads, a.seqlen_q, a.batch},
                 .strides = {a.q_stride_head, a.q_stride_seq, a.q_stride_batch},
                 .box = {kSlab, tile_heads, tile_positions, 1},
                 .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                 .type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                 .element_bytes = sizeof(Element),
                 .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B};
  if (!describe(&params.q, q)) {
    return kTensorMapRefused;
  }

  const Tensor k{.data = a.seqlen_k > 0 ? a.k : a.q,
                 .sizes = {kHeadDim, a.seqlen_k, a.kv_heads, a.batch},
                 .strides = {a.k_stride_seq, a.k_stride_head, a.k_stride_batch},
                 .box = {kSlab, kBlockN, 1, 1},
                 .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                 .type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                 .element_bytes = sizeof(Element),
                 .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B};
  if (!describe(&params.k, k)) {
    return kTensorMapRefused;
  }

  const Tensor v{.data = a.seqlen_k > 0 ? a.v : a.q,
                 .sizes = {kHeadDimV, a.seqlen_k, a.kv_heads, a.batch},
                 .strides = {a.v_stride_seq, a.v_stride_head, a.v_stride_batch},
                 .box = {kSlab, kBlockN, 1, 1},
                 .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                 .type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                 .element_bytes = sizeof(Element),
                 .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B};
  if (!describe(&params.v, v)) {
    return kTensorMapRefused;
  }

  if (!enqueue(decode, grid, kThreads, shared_bytes, stream, params)) {
    return kLaunchFailed;
  }
  if (!params.alone &&
      !enqueue(combine_partial_outputs, ceil_div(int64_t(a.seqlen_q) * a.heads * a.batch, 2),
               kCombineThreads, 0, stream, params)) {
    return kLaunchFailed;
  }
  return kOk;
}

}  // namespace fagen_dec_fp16_d128_causal_r16n64_host

extern "C" int fagen_dec_fp16_d128_causal_r16n64(const FagenDecodeArgs* args, void* stream) {
  using namespace fagen_dec_fp16_d128_causal_r16n64_host;
  const Status status = args ? check(*args) : kNullPointer;
  return status ? status : launch(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t fagen_dec_fp16_d128_causal_r16n64_workspace(const FagenDecodeArgs* args) {
  using namespace fagen_dec_fp16_d128_causal_r16n64_host;
  return args && !check_sizes(*args) ? workspace_bytes(*args) : -1;
}

extern "C" const char* fagen_dec_fp16_d128_causal_r16n64_message(int status) {
  using namespace fagen_dec_fp16_d128_causal_r16n64_host;
  constexpr int kNoKernel = 100;  // of who chooses among kernels
  return status >= 0 && status <= kLaunchFailed ? kMessages[status]
         : status == kNoKernel                  ? "no kernel computes that"
                                                : "unknown status";
}

extern "C" const FagenKernelInfo* fagen_dec_fp16_d128_causal_r16n64_info(void) {
  using namespace fagen_dec_fp16_d128_causal_r16n64_kernel;
  static const FagenKernelInfo info = {
      sizeof(FagenKernelInfo),
      kSharedBytes,
      kThreads,
      kLaunchRegisters,
      "dec_fp16_d128_causal_r16n64",
      "20e96b92bdff0abb04cdc3a83f239a34ae4b99bd8bdeafe8ebe6cdca5a5db70a"};
  return &info;
}
// sha256 of what is above: 8cc2e501bf8d49739e100698a20cd4bd59c175f83aaab097ba5ab1c57f78bde4
