// fwd_e4m3_d256_full_m128n64_varlen_half_nointer_pm1_pc32: fused attention forward for Hopper
// (sm_90a). Rendered by fagen; do not edit.
//
//   out = softmax(scale * q kᵀ) v,   lse = log(sum(exp(scale * q kᵀ)))
//
// One thread block computes a tile of 128 query rows of one head, 64 keys at a time from the last
// to the first, by online softmax in base 2. One producer warp copies Q, K and V into shared memory
// by TMA; 2 consumer warpgroups of 64 rows each multiply by WGMMA. Sequences lie one after another,
// each of its own length: one warp finds out where, and deals tiles.
//
// Q, K, V and P are in e4m3, with scales. The PV GEMM needs V transposed: other warps of the
// producer's warpgroup do that.
//
// Needs fagen_host.h, which lies beside it, the headers below, and
// -gencode=arch=compute_90a,code=sm_90a.

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
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

namespace fagen_fwd_e4m3_d256_full_m128n64_varlen_half_nointer_pm1_pc32_kernel {

// ---- The schedule ----------------------------------------------------------------------------

using Element = __nv_fp8_e4m3;
constexpr int kHeadDim = 256;
constexpr int kHeadDimV = 256;
constexpr int kHeadDimPadded = 256;  // in shared memory, padded with zeros
constexpr int kHeadDimVPadded = 256;
constexpr int kBlockM = 128;
constexpr int kBlockN = 64;
constexpr int kStages = 2;  // K and V buffers
constexpr int kQStages = 1;
constexpr int kConsumers = 2;  // warpgroups of 64 query rows
constexpr int kThreads = 384;
constexpr int kLaunchRegisters = 168;
constexpr int kStepK = 32;    // the K of every wgmma
constexpr int kQkSlab = 128;  // columns of a slab: one swizzle span, all rows of a slab together
constexpr auto kQkDescriptor = cute::SM90::GMMA::LayoutType::B128;

constexpr int kProducerRegisters = 56;
constexpr int kConsumerRegisters = 224;

constexpr int kTileStages = 6;    // tiles drawn and not yet done
constexpr int kTileReaders = 11;  // warps that ask for them
// Blocks before its end that a tile's successor is drawn: enough to hide the answer's way.
constexpr int kDrawAhead = 2;

constexpr int kUnrolledCopies = 8;  // that a thread issues without a loop

constexpr int kTransposedLoads = 4;  // units in flight while one is stored; each has four registers

constexpr int kVSlab = 64;  // of keys: V lies transposed
constexpr auto kVDescriptor = cute::SM90::GMMA::LayoutType::B64;
constexpr int kVSwizzleBits = 2;
constexpr int kVRowsSlab = 128;  // of V as it arrives
constexpr int kVRowsSwizzleBits = 3;
constexpr int kTransposers = 3;  // warps of the producer's warpgroup

constexpr float kNoScore = -1e+30f;  // where row maxima start: finite, so that no exponent is NaN
constexpr float kFar =
    65536.0f;  // exponents of 2 from here on are too coarse to be taken as they are
constexpr float kFarScale = 0.0009765625f;  // no smaller one leads there from products of e4m3
constexpr float kPOffset =
    8.0f;  // log2 units: P is kept this much larger, to use more of its range

constexpr int kOutputColumns = 256;

constexpr int kPartColumns = 32;  // of PV at a time

using OutElement = __nv_bfloat16;
constexpr int kOSlab = 64;
constexpr int kOSwizzleBits = 3;

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
  int batch;  // the number of the sequence
  Sequence sequence;
  int warpgroups, first_warpgroup;  // how many have rows, and which one the first 64
  Blocks blocks;                    // last < first: no tile
};

// What a warp has counted of all sequences.
struct alignas(16) Counted {
  uint32_t classes;
  int tiles;
};

// Descales in global memory, by batch and head, one for each block of rows where scales are by
// block.
struct ScaleTensor {
  const float* data;
  int64_t stride_batch, stride_head;

  __device__ __forceinline__ const float* at(int batch, int head) const {
    return data + batch * stride_batch + head * stride_head;
  }
};

// Reads the numbers of a thread's columns of O, two neighbours of each eight.
struct ColumnReader {
  const float* at;
  int64_t stride;

  __device__ __forceinline__ float2 next() {
    const float2 pair = {__ldg(at), __ldg(at + stride)};
    at += 8 * stride;
    return pair;
  }

  // Never true, but the compiler cannot know: it would load all columns at once, for which there
  // are no registers.
  __device__ __forceinline__ bool ends() {
    asm volatile("" : "+l"(at));
    return !at;
  }
};

// A number for each column of a head; strides are 0 where one serves for all.
struct ColumnTensor {
  const float* data;
  int64_t stride_batch, stride_head, stride_column;

  __device__ __forceinline__ const float* of(int batch, int head) const {
    return data + batch * stride_batch + head * stride_head;
  }

  __device__ __forceinline__ void prefetch(int batch, int head, int column) const {
    if (data) {
      asm volatile("prefetch.global.L1 [%0];" ::"l"(of(batch, head) + column * stride_column));
    }
  }
};

struct SharedStorage {
  alignas(1024) Element q[kQStages][kBlockM * kHeadDimPadded];
  alignas(1024) Element k[kStages][kBlockN * kHeadDimPadded];
  alignas(1024) Element v_rows[kStages][kBlockN * kHeadDimVPadded];  // row-major, as they arrive
  alignas(1024) Element v[kStages][kBlockN * kHeadDimVPadded];
  alignas(1024) OutElement o[kBlockM * kHeadDimVPadded / 2];
  alignas(1024) TransactionBarrier q_full[kQStages][kConsumers];
  TransactionBarrier k_full[kStages];
  TransactionBarrier v_full[kStages];
  TransactionBarrier v_rows_full[kStages];
  Barrier v_rows_empty[kStages];
  Barrier q_empty[kQStages][kConsumers];
  Barrier k_empty[kStages];
  Barrier v_empty[kStages];
  Barrier tile_full[kTileStages];
  Barrier tile_empty[kTileStages];
  union {                              // the second first
    Tile tiles[kTileStages];           // in work, and next
    Counted counted[kTileStages * 4];  // by warps
  };
};
constexpr int kSharedBytes = sizeof(SharedStorage);
static_assert(kSharedBytes <= 164864, "the layout outgrew the plan's ledger");

struct Params {
  CUtensorMap q, k, v, out;
  float* lse;  // may be null
  int64_t lse_stride_head;
  const int32_t* cu_seqlens_q;  // where sequences begin, and the last one ends
  const int32_t* cu_seqlens_k;  // the same of keys
  const int32_t* seqused_k;     // of how many keys each is to see the first ones; null: of all
  int batch, total_q, total_k, heads;
  FastDivisor heads_per_kv_head;
  uint32_t* tiles_drawn;  // beyond the first of each block
  ScaleTensor q_scale, k_scale;
  ColumnTensor v_scale, v_mean, k_mean;
  const Element* q_rows;
  int64_t q_stride_head, q_stride_seq;
  float scale_log2;  // scale * log2(e)
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

// What any rows see: all blocks.
__host__ __device__ __forceinline__ Blocks blocks_of(const Lengths& lengths, int, int) {
  return {0, ceil_div(lengths.seqlen_k, kBlockN)};
}

__device__ __forceinline__ Blocks blocks_of_tile(const Lengths& lengths, int m_block) {
  return blocks_of(lengths, m_block * kBlockM, m_block * kBlockM + kBlockM - 1);
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

  __device__ __forceinline__ int tiles_of_head() const {
    return ceil_div(sequence.seqlen_q, kBlockM);
  }

  __device__ __forceinline__ static int first_row_of(int m_block) { return m_block * kBlockM; }

  // How many warpgroups have rows of a tile.
  __device__ __forceinline__ int warpgroups_from(int first_row) const {
    return min(ceil_div(sequence.seqlen_q - first_row, kWarpgroupRows), kConsumers);
  }

  // The first tile of a head that sees so many blocks: all see the last key.
  __device__ __forceinline__ int first_with(int least) const {
    return ceil_div(sequence.seqlen_k, kBlockN) < least ? tiles_of_head() : 0;
  }

  // In a class tiles go sequence by sequence and KV head by KV head: who shares K and V loads them
  // at the same time.

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

  __device__ __forceinline__ void next_class() {
    own_class = highest_class(classes & ((1u << own_class) - 1));
  }

  // The head of a rank among the tiles of this lane's sequence and this class, and its row, counted
  // from the last.
  __device__ __forceinline__ void find_row(int rank, int& head, int& kv_head, int& row) const {
    const int group = params.heads_per_kv_head.value;
    kv_head = rank / (group * (end - begin));
    rank -= kv_head * group * (end - begin);
    row = params.heads_per_kv_head.divide(rank);
    head = kv_head * group + rank - row * group;
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
    tile.batch =
        min(first + lane(), max(0, params.batch - 1));  // for rows of no sequence too there is one
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

  // The next tile that sees a key; false at the end of these.
  __device__ __forceinline__ bool next(const Params&, Tile& tile) {
    tile = look();
    if (tile.blocks.last <= tile.blocks.first) {
      return false;
    }
    take_together();
    return true;
  }
};

// Then those that see none, which are nobody's work but for their zeros.
struct EmptyTiles {
  Tiles& tiles;

  __device__ __forceinline__ bool next(const Params&, Tile& tile) {
    tile = tiles.look();
    if (tile.blocks.last < tile.blocks.first) {
      return false;
    }
    tiles.take_together();
    return true;
  }
};

// Four numbers of e4m3, saturated, the first in the lowest byte.
__device__ __forceinline__ uint32_t pack(float a, float b, float c, float d) {
  uint32_t quad;
  asm("{ .reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, { low, high }; }"
      : "=r"(quad)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return quad;
}

using Part = float[kPartColumns / 2];  // of PV, to be added to O

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
  bool far = false;                     // see move_far

  // What a row's exponents are relative to. It is rounded here and nowhere else: P, its sum and the
  // log-sum-exp of a row share that rounding, and it cancels out.
  __device__ __forceinline__ float reference(int r) const {
    return __fmaf_rn(max[r], scale, -kPOffset);
  }

  // What is added to a row's scaled scores, which are relative to its maximum already where that is
  // far.
  __device__ __forceinline__ float offset_of(int r) const { return far ? kPOffset : -reference(r); }

  // The row maxima with a block of scores. Of floats of which one is not negative, the largest is
  // that of their bits; of three integers one instruction (VIMNMX3) finds it. Where all are
  // negative, that is the least, and floats are compared.
  __device__ __forceinline__ void find_top(const float (&s)[kBlockN / 2], float (&top)[2]) const {
    constexpr int kRowScores = kBlockN / 4;
    int largest[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const auto bits = [&](int i) { return __float_as_int(s[i / 2 * 4 + r * 2 + i % 2]); };
      int even =
          ::max(::max(bits(0), bits(1)), __float_as_int(max[r]));  // two chains, to hide latency
      int odd = ::max(::max(bits(2), bits(3)), bits(4));
#pragma unroll
      for (int i = 5; i + 3 < kRowScores; i += 4) {
        even = ::max(::max(bits(i), bits(i + 1)), even);
        odd = ::max(::max(bits(i + 2), bits(i + 3)), odd);
      }
      even = ::max(::max(bits(kRowScores - 3), bits(kRowScores - 2)), even);
      largest[r] = ::max(::max(even, odd), bits(kRowScores - 1));
      top[r] = __int_as_float(largest[r]);
    }
    if ((largest[0] | largest[1]) < 0) {
      float chains[4];
      find_largest<kBlockN / 2>(s, chains);
      top[0] = fmaxf(max[0], fmaxf(chains[0], chains[2]));
      top[1] = fmaxf(max[1], fmaxf(chains[1], chains[3]));
    }
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
      const float rise =
          far ? (before[r] - max[r]) * scale : __fmaf_rn(-max[r], scale, old[r] + kPOffset);
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
    if (scale >= kFarScale && (far || is_far(0) || is_far(1))) {
      move_far(s, before, old);
    }
    sum[0] *= rescale[0];
    sum[1] *= rescale[1];
  }

  // P of a block of scores, with these offsets, and its row sums.
  __device__ __forceinline__ void exponentiate(const float (&s)[kBlockN / 2],
                                               float (&p)[kBlockN / 2], float (&part)[2],
                                               const float (&offset)[2]) const {
    Chains chains;
    exponentiate_group<kBlockN / 2>(s, p, scale, offset, chains, true);
    part[0] = sum_of(chains, 0);
    part[1] = sum_of(chains, 1);
  }

  // P of a block of scores, in place, relative to the row maxima; its row sums are added up.
  __device__ __forceinline__ void exponentiate(float (&s)[kBlockN / 2]) {
    const float offset[2] = {offset_of(0), offset_of(1)};
    float part[2];
    exponentiate(s, s, part, offset);
    sum[0] += part[0];
    sum[1] += part[1];
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
  // A grid has one layer, and 0 is added. An upper word that the compiler knows it would move
  // beside the lower one before each wgmma; this one stays in a register.
  return {start >> 4 | leading_byte_offset >> 4 << 16,
          (stride_byte_offset >> 4 | uint32_t(layout) << 30) + blockIdx.z};
}

// From a descriptor to that of the k-th column of a tile of `rows` rows.
template <int rows, int slab>
__device__ constexpr uint32_t column_offset(int k) {
  return (k / slab * rows * slab + k % slab) * sizeof(Element) >> 4;
}

// S = or += Q Kᵀ, kStepK columns of each, both from shared memory.
template <bool accumulate>
__device__ __forceinline__ void wgmma_qk(float (&c)[32], Descriptor a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 }, "
      "%32, %33, %34, 1, 1;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
      : "l"(a.bits()), "l"(b.bits()), "n"(accumulate ? 1 : 0));
}

// kPartColumns columns of O = or += P V, kStepK keys of each, P from registers.
template <bool accumulate>
__device__ __forceinline__ void wgmma_pv(float (&c)[16], const uint32_t* a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15 }, "
      "{ %16, %17, %18, %19 }, %20, %21, 1, 1;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "n"(accumulate ? 1 : 0));
}

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

  uint32_t turns = 0;  // of warpgroups, each for 64 rows of Q

  __device__ __forceinline__ void load_q(const Tile& tile) {
    // The rows of each warpgroup that has some, as soon as it has read its last ones.
#pragma unroll 1
    for (int i = 0; i < tile.warpgroups; ++i, ++turns) {
      const uint32_t consumer = turns % kConsumers, round = turns / kConsumers;
      const uint32_t stage = round % kQStages, phase = round / kQStages % 2;
      shared.q_empty[stage][consumer].wait(phase ^ 1);
      copy<kHeadDimPadded, kWarpgroupRows, kQkSlab>(
          params.q, shared.q_full[stage][consumer],
          shared.q[stage] + consumer * kWarpgroupRows * kHeadDimPadded,
          tile.first_row + i * kWarpgroupRows, tile.head, of_q(tile),
          cute::TMA::CacheHintSm90::EVICT_FIRST);
    }
  }

  __device__ __forceinline__ void load_k(const Tile& tile, int block) {
    shared.k_empty[k.stage].wait(k.phase ^ 1);
    copy<kHeadDimPadded, kBlockN, kQkSlab>(params.k, shared.k_full[k.stage], shared.k[k.stage],
                                           block * kBlockN, tile.kv_head, of_k(tile),
                                           cute::TMA::CacheHintSm90::EVICT_LAST);
    k.advance();
  }

  // Row-major, for the transposers.
  __device__ __forceinline__ void load_v(const Tile& tile, int block) {
    shared.v_rows_empty[v.stage].wait(v.phase ^ 1);
    copy<kHeadDimVPadded, kBlockN, kVRowsSlab>(
        params.v, shared.v_rows_full[v.stage], shared.v_rows[v.stage], block * kBlockN,
        tile.kv_head, of_k(tile), cute::TMA::CacheHintSm90::EVICT_LAST);
    v.advance();
  }
};

// Draws tiles and passes them on. Used by the producer's whole warp: all others have work.
struct TileScheduler {
  SharedStorage& shared;
  TileFinder finder;
  int drawn = blockIdx.x - gridDim.x;  // beyond the first tile of each block, which nobody draws
  uint32_t passed_on = 0;              // tiles so far
  TileRing ring;

  // Asks for the next tile, by a single thread. The last to ask, one past the end for each block,
  // wraps the counter to zero: the next call finds it as this one did.
  __device__ __forceinline__ void draw() {
    drawn = atomicInc(finder.params.tiles_drawn, finder.tiles - 1);
  }

  // The block of a tile at which the next tile is drawn.
  __device__ __forceinline__ static int draws_at(const Blocks& blocks) {
    return blocks.first + kDrawAhead;
  }

  // The next tile, once it is drawn; false at the end.
  __device__ __forceinline__ bool next(Tile& tile) {
    const int number = gridDim.x + __shfl_sync(0xffffffff, drawn, 0);
    const uint32_t stage = passed_on % kTileStages, phase = passed_on / kTileStages % 2;
    shared.tile_empty[stage].wait(phase ^ 1);
    const bool found = finder.find(number, shared.tiles[stage]);
    __syncwarp();
    tile = shared.tiles[stage];
    if (lane() == 0) {
      ring.pass_on(shared, stage);
    }
    ++passed_on;
    return found;
  }
};

// The producer warp.
__device__ __forceinline__ void produce(const Params& params, SharedStorage& shared) {
  Loader loader{params, shared};
  TileScheduler tiles{shared, {params}};
  tiles.finder.begin_with_longest(shared.counted);
  for (Tile tile; tiles.next(tile);) {
    if (lane() > 0) {
      continue;  // one lane loads
    }
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

// ---- Transposing V ---------------------------------------------------------------------------

// wgmma reads 8-bit V along its keys only, and here in the order of keys in which P lies in
// registers.

// Loads four 8x8 matrices of 16-bit elements, transposed; each lane gives the address of one row.
__device__ __forceinline__ void load_transposed(const void* address, uint32_t (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3 }, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(cute::cast_smem_ptr_to_uint(address))
               : "memory");
}

// What bits 4… of a byte's offset in a slab are xored with, by the offset of its row.
template <int swizzle_bits>
__device__ __forceinline__ uint32_t flip(uint32_t row_offset) {
  return (row_offset >> 3) & (((1 << swizzle_bits) - 1) << 4);
}

// Transposes a warp's part of a block, in units of 32 keys by 16 columns. To ldmatrix two columns
// are one 16-bit element: a lane gets keys 2q, 2q + 1, and from the next matrix 8 + 2q, 9 + 2q, of
// a pair of columns, where q is lane % 4. That is P's order already. What remains is to part the
// pair.
template <int transposer>
__device__ __forceinline__ void transpose(const Element* rows, Element* columns) {
  uint32_t lane;  // read anew, lest what follows from it stay in registers
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  const uint32_t key_row = lane * kVRowsSlab;  // a lane gives ldmatrix the address of its key
  const uint32_t source = key_row ^ flip<kVRowsSwizzleBits>(key_row);
  // stmatrix writes eight rows at once, which must be in different banks, as even columns alone are
  // not: so the lanes of the upper four pairs part them the other way round.
  const uint32_t even = lane < 16 ? 0x6420 : 0x7531;
  const uint32_t pair = lane % 8;  // whose address, in matrix lane / 8, this lane gives to stmatrix
  const uint32_t column_row = (2 * pair + (lane / 8 % 2 ^ pair / 4)) * kVSlab;
  const uint32_t target = (column_row + lane / 16 * 16) ^ flip<kVSwizzleBits>(column_row);

  constexpr int kKeyUnits = kBlockN / 32;
  constexpr int kUnits = kHeadDimVPadded / 16 * kKeyUnits;  // of all transposers
  constexpr int kFirst = ceil_div(transposer * kUnits, kTransposers);
  constexpr int kLast = ceil_div((transposer + 1) * kUnits, kTransposers);
  uint32_t x[kTransposedLoads][4];
#pragma unroll
  for (int next = kFirst; next < kLast + kTransposedLoads; ++next) {
    if (next >= kFirst + kTransposedLoads) {
      const int unit = next - kTransposedLoads, key = unit % kKeyUnits * 32,
                column = unit / kKeyUnits * 16;
      const uint32_t (&pairs)[4] = x[unit % kTransposedLoads];
      store_matrices(
          columns + (key / kVSlab * kHeadDimVPadded + column) * kVSlab + (target ^ key % kVSlab),
          __byte_perm(pairs[0], pairs[1], even), __byte_perm(pairs[0], pairs[1], even ^ 0x1111),
          __byte_perm(pairs[2], pairs[3], even), __byte_perm(pairs[2], pairs[3], even ^ 0x1111));
    }
    if (next < kLast) {
      const int key = next % kKeyUnits * 32, column = next / kKeyUnits * 16;
      load_transposed(rows + (column / kVRowsSlab * kBlockN + key) * kVRowsSlab +
                          (source ^ column % kVRowsSlab),
                      x[next % kTransposedLoads]);
    }
  }
}

// Transposes the next block, as one of the warps of the producer's warpgroup that do not load.
template <int transposer>
__device__ __forceinline__ void transpose_block(SharedStorage& shared, RingPosition<kStages>& v) {
  shared.v_rows_full[v.stage].wait(v.phase);
  shared.v_empty[v.stage].wait(v.phase ^ 1);
  transpose<transposer>(shared.v_rows[v.stage], shared.v[v.stage]);
  // For what wgmma reads and for what TMA overwrites.
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
  if (lane() == 0) {
    shared.v_full[v.stage].arrive();
    shared.v_rows_empty[v.stage].arrive();
  }
  v.advance();
}

template <int transposer>
__device__ __forceinline__ void produce_transposed_v(const Params& params, SharedStorage& shared) {
  RingPosition<kStages> v;
  Tiles tiles{shared};
  for (Tile tile; tiles.next(params, tile);) {
    for (int block = tile.blocks.last - 1; block >= tile.blocks.first; --block) {
      transpose_block<transposer>(shared, v);
    }
  }
  EmptyTiles rest{tiles};
  for (Tile tile; rest.next(params, tile);) {
  }
}

// Each has code of its own: so where its units lie is known there, but for a lane's part of it.
__device__ __forceinline__ void produce_transposed_v(const Params& params, SharedStorage& shared) {
  switch (__shfl_sync(0xffffffff, threadIdx.x / 32, 0) - (kWarpgroup / 32 - kTransposers)) {
    case 0:
      return produce_transposed_v<0>(params, shared);
    case 1:
      return produce_transposed_v<1>(params, shared);
    case 2:
      return produce_transposed_v<2>(params, shared);
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
  __device__ __forceinline__ int first_row(const Tile& tile) {
    return tile.first_row + place(tile) * kWarpgroupRows;
  }

  __device__ __forceinline__ static int seqlen_k(const Tile& tile) {
    return tile.sequence.seqlen_k;
  }

  // Masks the keys of a block that do not exist.
  __device__ __forceinline__ void mask_block(float (&s)[kBlockN / 2], const Tile& tile, int block) {
    const int last = seqlen_k(tile) - block * kBlockN - lane() % 4 * 2;
    if (seqlen_k(tile) >= (block + 1) * kBlockN) {
      return;
    }
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) {
      if (column_of(i) >= last) {
        s[i] = -INFINITY;
      }
    }
  }

  // Where a row of Q is in global memory.
  __device__ __forceinline__ const Element* q_row(const Tile& tile, int row) const {
    const int64_t first = tile.sequence.end_q - tile.sequence.seqlen_q;
    return params.q_rows + tile.head * params.q_stride_head + (first + row) * params.q_stride_seq;
  }

  // P as the register operand of the PV GEMM. There a thread has four neighbouring columns of a
  // row, where in the accumulator it has two and, eight columns on, two more. These are taken as
  // they are: V's keys lie in that order.
  using Probabilities = uint32_t[kBlockN * sizeof(Element) / 8];

  __device__ __forceinline__ void pack_p(Probabilities& p, const float (&s)[kBlockN / 2]) {
#pragma unroll
    for (int i = 0; i < kBlockN / 8; ++i) {
      const float* x = s + i / 2 * 8 + i % 2 * 2;
      p[i] = pack(x[0], x[1], x[4], x[5]);
    }
  }

  // The descriptor of V from a column on, which lies transposed, and from it to that of its n-th
  // key.
  __device__ __forceinline__ Descriptor v_begin(int column = 0) const {
    return descriptor<kVSlab>(shared.v[v.stage] + column * kVSlab, kVDescriptor);
  }
  __device__ __forceinline__ static uint32_t v_offset(int n) {
    return column_offset<kHeadDimVPadded, kVSlab>(n);
  }

  // What O's columns will be multiplied by, and their means, to the L1 cache before they are
  // needed.
  __device__ __forceinline__ void prefetch_columns(const Tile& tile) const {
    for (int column = threadIdx.x % kWarpgroup; column < kHeadDimV; column += kWarpgroup) {
      params.v_scale.prefetch(tile.batch, tile.kv_head, column);
      params.v_mean.prefetch(tile.batch, tile.kv_head, column);
    }
  }

  // Issues a part of PV: its columns from this one on. The tensor cores cut long sums off, so that
  // none goes beyond a block.
  __device__ __forceinline__ void issue_pv(Part& part, Probabilities& p, int column) {
    const Descriptor first = v_begin(column);
    fence_operand(part);
    fence_operand(p);
    wgmma_fence();
    wgmma_pv<false>(part, p, first);
#pragma unroll
    for (int n = kStepK; n < kBlockN; n += kStepK) {
      wgmma_pv<true>(part, p + n * sizeof(Element) / 8, first + v_offset(n));
    }
    wgmma_commit();
  }

  // Adds a part to O, which is made relative to the row maxima of the part's P.
  __device__ __forceinline__ void add(Output& o, Part& part, int column,
                                      const float (&rescale)[2]) {
    fence_operand(part);
#pragma unroll
    for (int i = 0; i < kPartColumns / 2; ++i) {
      o[column / 2 + i] = fmaf(o[column / 2 + i], rescale[row_of(i)], part[i]);
    }
  }

  // O += PV, of which the first part is under way; what is to be done meanwhile runs under the
  // second one. O is rescaled for this P, whatever the next one's row maxima are.
  template <class Meanwhile>
  __device__ __forceinline__ void finish_pv(Output& o, Part& part, Probabilities& p,
                                            const float (&rescale)[2], Meanwhile meanwhile) {
#pragma unroll
    for (int column = 0; column < kOutputColumns; column += kPartColumns) {
      if (column == kPartColumns) {
        meanwhile();
      }
      wgmma_wait<0>();
      add(o, part, column, rescale);
      if (column + kPartColumns < kOutputColumns) {
        issue_pv(part, p, column + kPartColumns);
      }
    }
    fence_operand(p);  // whose registers are free only now
    release_v();
  }

  __device__ __forceinline__ void finish_pv(Output& o, Part& part, Probabilities& p,
                                            const float (&rescale)[2]) {
    finish_pv(o, part, p, rescale, [] {});
  }

  // Issues S = QKᵀ.
  __device__ __forceinline__ void issue_qk(float (&s)[kBlockN / 2]) {
    int stage = q.stage;
    asm volatile("" : "+r"(stage));  // lest the descriptors of all of Q's columns stay in registers
    const Descriptor q_rows = descriptor<kQkSlab>(
        shared.q[stage] + warpgroup * kWarpgroupRows * kHeadDimPadded, kQkDescriptor);
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

  __device__ __forceinline__ static float scale_at(const ScaleTensor& scale, int batch, int head) {
    return scale.data ? __ldg(scale.at(batch, head)) : 1.f;
  }

  // The softmax of a tile before its first score.
  __device__ __forceinline__ Softmax softmax_of(const Tile& tile) const {
    prefetch_columns(tile);
    return {params.scale_log2 * q_scale_of(tile, 0) *
            scale_at(params.k_scale, tile.batch, tile.kv_head)};
  }

  __device__ __forceinline__ float q_scale_of(const Tile& tile, int row) const {
    return scale_at(params.q_scale, tile.batch, tile.head);
  }

  // The softmax of rows before their first score, of which softmax_of(tile) knows the scale.
  __device__ __forceinline__ static Softmax fresh_softmax() { return {}; }

  // What K's mean, taken off before K was quantised, adds to a row's scores, in log2 units. Four
  // lanes share a row.
  __device__ __forceinline__ float mean_score(const Tile& tile, int row) const {
    float sum = 0.f;
    if (row < seqlen_q(tile)) {
      const Element* q = q_row(tile, row);
      const float* mean = params.k_mean.of(tile.batch, tile.kv_head);
#pragma unroll 1
      for (int column = lane() % 4; column < kHeadDim; column += 4) {
        sum = fmaf(float(q[column]), __ldg(mean + column * params.k_mean.stride_column), sum);
      }
      sum *= q_scale_of(tile, row);
    }
    return params.scale_log2 * quad_sum(sum);
  }

  // P of a tile's first block, whose S is complete and masked.
  __device__ __forceinline__ void first_scores(const Tile& tile, float (&s)[kBlockN / 2],
                                               Probabilities& p, Softmax& softmax) {
    softmax.update_row_max(s);
    softmax.exponentiate(s);
    pack_p(p, s);
  }

  // P of a block whose S is complete and masked, while PV of the block before ends; O is rescaled
  // for it.
  __device__ __forceinline__ void next_scores_under_pv(float (&s)[kBlockN / 2], Probabilities& p,
                                                       Output& o, Part& part, Softmax& softmax) {
    const float rescale[2] = {softmax.rescale[0],
                              softmax.rescale[1]};  // of P, which is not yet added up
    softmax.update_row_max(s);
    finish_pv(o, part, p, rescale, [&] { softmax.exponentiate(s); });
    pack_p(p, s);
  }

  // One block, with two GEMMs in flight: S of this block and PV of the block before. Its softmax
  // runs under the GEMMs of other warpgroups.
  template <bool masked>
  __device__ __forceinline__ void step(const Tile& tile, int block, float (&s)[kBlockN / 2],
                                       Probabilities& p, Output& o, Softmax& softmax) {
    wait_k();
    issue_qk(s);
    wait_v();
    Part part;
    issue_pv(part, p, 0);
    wgmma_wait<1>();
    finish_qk(s, block == tile.blocks.first);
    if (masked) {
      mask_block(s, tile, block);
    }
    next_scores_under_pv(s, p, o, part, softmax);
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
    Part part;
    issue_pv(part, p, 0);
    finish_pv(o, part, p, softmax.rescale);
    const Softmax fresh = softmax_of(tiles.look(1));
    q.advance();
    wait_q();
    wait_k();
    issue_qk(s);
    store(Tile(tiles.look()), o, softmax);
    reset(o, softmax);
    softmax = fresh;
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
  __device__ __forceinline__ void last_pv(const Tile& tile, Probabilities& p, Output& o,
                                          const Softmax& softmax) {
    wait_v();
    Part part;
    issue_pv(part, p, 0);
    finish_pv(o, part, p, softmax.rescale);
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
      for (; block >= tile.blocks.first; --block) {
        step<false>(tile, block, s, p, o, softmax);
      }
      if (const Tile& next = tiles.look(1); blocks_in(next) <= 0 || !has_rows(next)) {
        break;
      }
      next_tile(tiles, tile, s, p, o, softmax);
    }
    last_pv(tile, p, o, softmax);
  }

  __device__ __forceinline__ void reset(Output& o, Softmax& softmax) {
#pragma unroll
    for (int i = 0; i < kOutputColumns / 2; ++i) {
      o[i] = 0.f;
    }
    softmax = fresh_softmax();
  }

  __device__ __forceinline__ void run() {
    Tiles tiles{shared};
    Output o = {};
    Softmax softmax = fresh_softmax();
    for (;;) {
      if (next_with_rows(tiles)) {
        softmax = softmax_of(tiles.look());
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

  // Where LSE of a tile's head begins: the first row of its sequence.
  __device__ __forceinline__ int64_t lse_begin(const Tile& tile) const {
    return tile.head * params.lse_stride_head + tile.sequence.end_q - tile.sequence.seqlen_q;
  }

  // Copies columns of the warpgroup's rows of O, from `column` on, a slab from shared memory.
  __device__ __forceinline__ void copy_out(const Tile& tile, const OutElement* slab, int column) {
    cute::SM90_TMA_STORE_5D::copy(&params.out, slab, column,
                                  kRagged - tile.sequence.seqlen_q + first_row(tile), tile.head,
                                  kRagged, tile.sequence.end_q);
  }

  // Multiplies O by V's descales.
  __device__ __forceinline__ void scale_columns(const Tile& tile, Output& o) const {
    ColumnReader scale = {
        params.v_scale.of(tile.batch, tile.kv_head) + lane() % 4 * 2 * params.v_scale.stride_column,
        params.v_scale.stride_column};
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; i += 4) {
      const float2 pair = scale.next();
      o[i] *= pair.x;
      o[i + 1] *= pair.y;
      o[i + 2] *= pair.x;
      o[i + 3] *= pair.y;
      if (i % 32 == 28 && scale.ends()) {
        return;
      }
    }
  }

  // Adds what was taken off V's columns, whose weights in a row add up to one.
  __device__ __forceinline__ void add_means(const Tile& tile, Output& o) const {
    ColumnReader mean = {
        params.v_mean.of(tile.batch, tile.kv_head) + lane() % 4 * 2 * params.v_mean.stride_column,
        params.v_mean.stride_column};
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; i += 4) {
      const float2 pair = mean.next();
      o[i] += pair.x;
      o[i + 1] += pair.y;
      o[i + 2] += pair.x;
      o[i + 3] += pair.y;
      if (i % 32 == 28 && mean.ends()) {
        return;
      }
    }
  }

  // Averages of V, with its descales and means.
  __device__ __forceinline__ void descale(const Tile& tile, Output& o, const float (&inverse)[2],
                                          const bool (&empty)[2]) const {
    const bool by_column = params.v_scale.data && params.v_scale.stride_column != 0;
    float factor[2] = {inverse[0], inverse[1]};
    if (params.v_scale.data && !by_column) {
      const float scale = __ldg(params.v_scale.of(tile.batch, tile.kv_head));
      factor[0] *= scale;
      factor[1] *= scale;
    }
#pragma unroll
    for (int i = 0; i < kHeadDimVPadded / 2; ++i) {
      o[i] *= factor[row_of(i)];
    }
    if (by_column) {
      scale_columns(tile, o);
    }
    if (params.v_mean.data) {
      add_means(tile, o);
    }
    // A row that sees no key is zeros, not 0 times a V that may not be finite, and without its
    // mean.
    if (__any_sync(0xffffffff, empty[0] || empty[1])) {
#pragma unroll
      for (int i = 0; i < kHeadDimVPadded / 2; ++i) {
        o[i] = empty[row_of(i)] ? 0.f : o[i];
      }
    }
  }

  // Writes columns of the warpgroup's rows to shared memory, from column `first` of O on.
  template <int columns>
  __device__ __forceinline__ void round_rows(OutElement* rows, const Output& o, int first,
                                             const float (&)[2], const bool (&)[2]) {
    store_accumulator<columns, kOSlab, kOSwizzleBits>(rows,
                                                      [&](int i) { return o[first / 2 + i]; });
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
    constexpr int kHalf = kHeadDimVPadded / 2;  // columns of O that its buffer holds
#pragma unroll
    for (int first = 0; first < kHeadDimVPadded; first += kHalf) {
      write_columns<kHalf>(tile, o, first, inverse, empty);
    }
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
      const int row = first_row(tile) + thread_row() + r * 8;
      const float mean = params.lse && params.k_mean.data ? mean_score(tile, row) : 0.f;
      if (params.lse && lane() % 4 == 0 && row < seqlen_q(tile)) {
        const int64_t head = lse_begin(tile);
        params.lse[head + row] =
            empty[r] ? -INFINITY
                     : (softmax.reference(r) + log2_approx(sum) + mean) * 0.69314718056f;
      }
    }
    descale(tile, o, inverse, empty);
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
      shared.v_full[stage].init(kTransposers);
      shared.k_empty[stage].init(kConsumers * kWarpgroup / 32);
      shared.v_empty[stage].init(kConsumers * kWarpgroup / 32);
      shared.v_rows_full[stage].init(1);
      shared.v_rows_empty[stage].init(kTransposers);
    }
    for (int stage = 0; stage < kTileStages; ++stage) {
      shared.tile_full[stage].init(1);
      shared.tile_empty[stage].init(kTileReaders);
    }
    cutlass::arch::fence_barrier_init();
  }
  TileFinder{params}.count_all(shared.counted);
  __syncthreads();
  const int warpgroup =
      __shfl_sync(0xffffffff, threadIdx.x / kWarpgroup, 0);  // known to be uniform
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    if (threadIdx.x / 32 == 0) {
      produce(params, shared);
    } else if (threadIdx.x >= kWarpgroup - 32 * kTransposers) {
      produce_transposed_v(params, shared);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    Consumer consumer{params, shared, warpgroup - 1};
    consumer.run();
  }
}

}  // namespace fagen_fwd_e4m3_d256_full_m128n64_varlen_half_nointer_pm1_pc32_kernel

// ---- The C interface -------------------------------------------------------------------------

#ifndef FAGEN_FORWARD_VARLEN_FP8_ARGS
#define FAGEN_FORWARD_VARLEN_FP8_ARGS 1

extern "C" {

// One varlen fp8 call of a kernel of kind forward: the same struct for all of them. Strides are in
// elements; a dimension without one is contiguous.
struct FagenForwardVarlenFp8Args {
  uint32_t struct_bytes;  // sizeof(FagenForwardVarlenFp8Args)
  uint32_t version;       // 1: callers built for another are recognised
  void* workspace;  // from a multiple of 16 bytes on as large as fagen_<slug>_workspace says; null
                    // where that is nothing
  int64_t workspace_bytes;   // how large it is
  const void* q;             // e4m3 (total_q, heads, 256)
  const void* k;             // e4m3 (total_k, kv_heads, 256)
  const void* v;             // e4m3 (total_k, kv_heads, 256)
  const void* cu_seqlens_q;  // int32 (offsets): the row of q at which each sequence begins, and the
                             // end of the last; offsets = batch + 1
  const void* cu_seqlens_k;  // int32 (offsets): the row of k and v at which each sequence begins,
                             // and the end of the last; offsets = batch + 1
  const void* seqused_k;  // int32 (offsets - 1): how many of its keys each sequence sees, the first
                          // ones; null: all
  const void* q_descale;  // fp32 (offsets - 1 or 1, heads or 1, 1): what q is to be multiplied by,
                          // finite and above 0; null: 1
  const void* k_descale;  // fp32 (offsets - 1 or 1, kv_heads or 1, 1): what k is to be multiplied
                          // by, finite and above 0; null: 1
  const void* v_descale;  // fp32 (offsets - 1 or 1, kv_heads or 1, 256 or 1): what columns of v are
                          // to be multiplied by, finite and above 0; null: 1
  const void* v_mean;     // fp32 (offsets - 1 or 1, kv_heads or 1, 256 or 1): what was taken off
                          // columns of v before they were quantised; null: nothing
  const void* k_mean;     // fp32 (offsets - 1 or 1, kv_heads or 1, 256 or 1): what was taken off
                          // columns of k before they were quantised; null: nothing
  void* out;  // bf16 (total_q, heads, 256): zeros in a row that sees no key, or is of no sequence
  void* lse;  // fp32 (heads, total_q): log-sum-exp, natural logarithm; minus infinity in a row that
              // sees no key; null if not wanted
  int64_t q_stride_head, q_stride_seq;
  int64_t k_stride_head, k_stride_seq;
  int64_t v_stride_head, v_stride_seq;
  int64_t q_descale_stride_batch, q_descale_stride_head;
  int64_t k_descale_stride_batch, k_descale_stride_head;
  int64_t v_descale_stride_batch, v_descale_stride_column, v_descale_stride_head;
  int64_t v_mean_stride_batch, v_mean_stride_column, v_mean_stride_head;
  int64_t k_mean_stride_batch, k_mean_stride_column, k_mean_stride_head;
  int64_t out_stride_head, out_stride_seq;
  int64_t lse_stride_head;
  int32_t total_q, total_k, offsets, heads, kv_heads;
  float scale;  // of q kᵀ before the softmax; finite and positive, 1e+08 at most
};

}  // extern "C"

#elif FAGEN_FORWARD_VARLEN_FP8_ARGS != 1
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
int fagen_fwd_e4m3_d256_full_m128n64_varlen_half_nointer_pm1_pc32(
    const struct FagenForwardVarlenFp8Args* args, void* stream);
// How many bytes of workspace a call of these sizes needs; -1 where args is null, or a call of such
// sizes is refused. They are zeros before the first call, and each call leaves them so; calls that
// may run at once need one each.
int64_t fagen_fwd_e4m3_d256_full_m128n64_varlen_half_nointer_pm1_pc32_workspace(
    const struct FagenForwardVarlenFp8Args* args);
const char* fagen_fwd_e4m3_d256_full_m128n64_varlen_half_nointer_pm1_pc32_message(int status);
const struct FagenKernelInfo* fagen_fwd_e4m3_d256_full_m128n64_varlen_half_nointer_pm1_pc32_info(
    void);

}  // extern "C"

// ---- The host's side -------------------------------------------------------------------------

#include "fagen_host.h"
#if FAGEN_HOST_H != 0xa95921b9
#error "the fagen_host.h beside this kernel is that of another version of fagen"
#endif

namespace fagen_fwd_e4m3_d256_full_m128n64_varlen_half_nointer_pm1_pc32_host {

using namespace fagen_fwd_e4m3_d256_full_m128n64_varlen_half_nointer_pm1_pc32_kernel;
using namespace fagen_host;
using fagen_host::ceil_div;  // of 64 bits: not what a kernel calls so

// What calls end with, by Status.
constexpr const char* kMessages[] = {
    "launched",
    "struct_bytes or version is that of another FagenForwardVarlenFp8Args",
    "a size is negative or too large",
    "heads must be a multiple of kv_heads",
    "there are 2^30 tiles or more",
    "scale must be finite and positive, scale 1e+08 at most",
    "a tensor is given that cannot be",
    "a tensor that is needed is null",
    "a tensor does not begin at a multiple of 16 bytes (cu_seqlens_q: 4, cu_seqlens_k: 4, seqused_k: 4, q_descale: 4, k_descale: 4, v_descale: 4, v_mean: 4, k_mean: 4, lse: 4)",
    "a stride is negative, too large, or no multiple of 16 bytes",
    "elements of an output (out, lse) overlap: a stride is 0 or too small",
    "the workspace is null, too small, or does not begin at a multiple of 16 bytes",
    "the current device is not a Hopper GPU (compute capability 9.0)",
    "the CUDA driver is missing, or too old for tensor maps",
    "the CUDA driver refused to describe a tensor for TMA",
    "the kernel could not be launched",
};

// Whether sizes go together, and are not too large.
Status check_sizes(const FagenForwardVarlenFp8Args& a) {
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
int64_t workspace_bytes([[maybe_unused]] const FagenForwardVarlenFp8Args& a) {
  return int64_t(4);
}

Status check(const FagenForwardVarlenFp8Args& a) {
  if (a.struct_bytes != sizeof(a) || a.version != FAGEN_FORWARD_VARLEN_FP8_ARGS) {
    return kWrongStruct;
  }
  if (const Status status = check_sizes(a)) {
    return status;
  }
  if (!(a.scale > 0) || !std::isfinite(a.scale) || a.scale > 100000000.0) {
    return kBadScalar;
  }
  for (const Status status : {
           check_tensor(a.q, 1, true, false, 4294967296, 256,
                        {{a.total_q, a.q_stride_seq}, {a.heads, a.q_stride_head}}),
           check_tensor(a.k, 1, true, false, 4294967296, 256,
                        {{a.total_k, a.k_stride_seq}, {a.kv_heads, a.k_stride_head}}),
           check_tensor(a.v, 1, true, false, 4294967296, 256,
                        {{a.total_k, a.v_stride_seq}, {a.kv_heads, a.v_stride_head}}),
           check_tensor(a.cu_seqlens_q, 4, false, false, kMostStride, a.offsets, {}),
           check_tensor(a.cu_seqlens_k, 4, false, false, kMostStride, a.offsets, {}),
           !a.seqused_k
               ? kOk
               : check_tensor(a.seqused_k, 4, false, false, kMostStride, a.offsets - 1, {}),
           !a.q_descale ? kOk
                        : check_tensor(a.q_descale, 4, false, false, 1073741824, 1,
                                       {{a.offsets - 1, a.q_descale_stride_batch},
                                        {a.heads, a.q_descale_stride_head}}),
           !a.k_descale ? kOk
                        : check_tensor(a.k_descale, 4, false, false, 1073741824, 1,
                                       {{a.offsets - 1, a.k_descale_stride_batch},
                                        {a.kv_heads, a.k_descale_stride_head}}),
           !a.v_descale ? kOk
                        : check_tensor(a.v_descale, 4, false, false, 1073741824, 1,
                                       {{a.offsets - 1, a.v_descale_stride_batch},
                                        {a.kv_heads, a.v_descale_stride_head},
                                        {256, a.v_descale_stride_column}}),
           !a.v_mean ? kOk
                     : check_tensor(a.v_mean, 4, false, false, 1073741824, 1,
                                    {{a.offsets - 1, a.v_mean_stride_batch},
                                     {a.kv_heads, a.v_mean_stride_head},
                                     {256, a.v_mean_stride_column}}),
           !a.k_mean ? kOk
                     : check_tensor(a.k_mean, 4, false, false, 1073741824, 1,
                                    {{a.offsets - 1, a.k_mean_stride_batch},
                                     {a.kv_heads, a.k_mean_stride_head},
                                     {256, a.k_mean_stride_column}}),
           check_tensor(a.out, 2, true, true, 4294967296, 256,
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

Status launch(const FagenForwardVarlenFp8Args& a, cudaStream_t stream) {
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
  params.heads = a.heads;
  params.heads_per_kv_head = FastDivisor(a.heads / a.kv_heads);
  params.tiles_drawn = static_cast<uint32_t*>(a.workspace);
  params.q_scale = {static_cast<const float*>(a.q_descale), a.q_descale_stride_batch,
                    a.q_descale_stride_head};
  params.k_scale = {static_cast<const float*>(a.k_descale), a.k_descale_stride_batch,
                    a.k_descale_stride_head};
  params.v_scale = {static_cast<const float*>(a.v_descale), a.v_descale_stride_batch,
                    a.v_descale_stride_head, a.v_descale_stride_column};
  params.v_mean = {static_cast<const float*>(a.v_mean), a.v_mean_stride_batch, a.v_mean_stride_head,
                   a.v_mean_stride_column};
  params.k_mean = {static_cast<const float*>(a.k_mean), a.k_mean_stride_batch, a.k_mean_stride_head,
                   a.k_mean_stride_column};
  params.q_rows = static_cast<const Element*>(a.q);
  params.q_stride_head = a.q_stride_head;
  params.q_stride_seq = a.q_stride_seq;
  params.scale_log2 = a.scale * 1.44269504089f;

  params.cu_seqlens_q = a.offsets > 0 ? static_cast<const int32_t*>(a.cu_seqlens_q) : nullptr;
  params.batch = std::max(0, a.offsets - 1);
  // How many tiles there are the GPU finds out: no more than these, of which each offset may add a
  // part.
  const int64_t most_tiles = (ceil_div(a.total_q, kBlockM) + a.offsets) * a.heads;
  const int grid = int(std::min<int64_t>(most_tiles, multiprocessors));

  const Tensor q{.data = a.q,
                 .sizes = {kHeadDim, a.total_q, a.heads},
                 .strides = {a.q_stride_seq, a.q_stride_head},
                 .box = {kQkSlab, kWarpgroupRows, 1},
                 .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                 .type = CU_TENSOR_MAP_DATA_TYPE_UINT8,
                 .element_bytes = sizeof(Element),
                 .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe_varlen(&params.q, q, kRagged)) {
    return kTensorMapRefused;
  }

  const Tensor k{.data = a.total_k > 0 ? a.k : a.q,
                 .sizes = {kHeadDim, a.total_k, a.kv_heads},
                 .strides = {a.k_stride_seq, a.k_stride_head},
                 .box = {kQkSlab, kBlockN, 1},
                 .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                 .type = CU_TENSOR_MAP_DATA_TYPE_UINT8,
                 .element_bytes = sizeof(Element),
                 .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe_varlen(&params.k, k, kRagged)) {
    return kTensorMapRefused;
  }

  const Tensor v{.data = a.total_k > 0 ? a.v : a.q,
                 .sizes = {kHeadDimV, a.total_k, a.kv_heads},
                 .strides = {a.v_stride_seq, a.v_stride_head},
                 .box = {kVRowsSlab, kBlockN, 1},
                 .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                 .type = CU_TENSOR_MAP_DATA_TYPE_UINT8,
                 .element_bytes = sizeof(Element),
                 .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe_varlen(&params.v, v, kRagged)) {
    return kTensorMapRefused;
  }

  const Tensor out{.data = a.out,
                   .sizes = {kHeadDimV, a.total_q, a.heads},
                   .strides = {a.out_stride_seq, a.out_stride_head},
                   .box = {kOSlab, kWarpgroupRows, 1},
                   .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                   .type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                   .element_bytes = sizeof(OutElement),
                   .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe_varlen(&params.out, out, kRagged)) {
    return kTensorMapRefused;
  }

  attention_forward<<<grid, kThreads, shared_bytes, stream>>>(params);
  return cudaGetLastError() == cudaSuccess ? kOk : kLaunchFailed;
}

}  // namespace fagen_fwd_e4m3_d256_full_m128n64_varlen_half_nointer_pm1_pc32_host

extern "C" int fagen_fwd_e4m3_d256_full_m128n64_varlen_half_nointer_pm1_pc32(
    const FagenForwardVarlenFp8Args* args, void* stream) {
  using namespace fagen_fwd_e4m3_d256_full_m128n64_varlen_half_nointer_pm1_pc32_host;
  const Status status = args ? check(*args) : kNullPointer;
  return status ? status : launch(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t fagen_fwd_e4m3_d256_full_m128n64_varlen_half_nointer_pm1_pc32_workspace(
    const FagenForwardVarlenFp8Args* args) {
  using namespace fagen_fwd_e4m3_d256_full_m128n64_varlen_half_nointer_pm1_pc32_host;
  return args && !check_sizes(*args) ? workspace_bytes(*args) : -1;
}

extern "C" const char* fagen_fwd_e4m3_d256_full_m128n64_varlen_half_nointer_pm1_pc32_message(
    int status) {
  using namespace fagen_fwd_e4m3_d256_full_m128n64_varlen_half_nointer_pm1_pc32_host;
  constexpr int kNoKernel = 100;  // of who chooses among kernels
  return status >= 0 && status <= kLaunchFailed ? kMessages[status]
         : status == kNoKernel                  ? "no kernel computes that"
                                                : "unknown status";
}

extern "C" const FagenKernelInfo*
fagen_fwd_e4m3_d256_full_m128n64_varlen_half_nointer_pm1_pc32_info(void) {
  using namespace fagen_fwd_e4m3_d256_full_m128n64_varlen_half_nointer_pm1_pc32_kernel;
  static const FagenKernelInfo info = {
      sizeof(FagenKernelInfo),
      kSharedBytes,
      kThreads,
      kLaunchRegisters,
      "fwd_e4m3_d256_full_m128n64_varlen_half_nointer_pm1_pc32",
      "aced8ef48b215492f47038dedb9b744e3429e1433835f6ec6eaf30f26452ce6a"};
  return &info;
}
// sha256 of what is above: e3e535d26a4a4652f2e7de3dc2a4c0e60c04ceba6b1ac2bcece5c5ba9e6ed83f
