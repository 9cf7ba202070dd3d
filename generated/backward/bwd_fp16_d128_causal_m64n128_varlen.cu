// bwd_fp16_d128_causal_m64n128_varlen: the gradients of fused attention for Hopper (sm_90a).
// Rendered by fagen; do not edit.
//
//   P = exp(scale * q kᵀ - lse)        dv = Pᵀ dout
//   dP = dout vᵀ                       dS = P (dP - delta), delta = sum(dout * out) of a row
//   dk = scale * dSᵀ q                 dq = scale * dS k
//
// A first kernel works out delta, and a last one rounds dq. Between them a thread block has 128
// keys of one KV head and goes through all rows that see them, 64 at a time, of each query head of
// its group. dk and dv stay in registers; dq is added up in global memory, in fp32.
//
// S and dP lie transposed, keys along the rows: so P and dS are, as they come out of one GEMM, the
// register operands of the next. One producer warp loads by TMA, and two add dq up by TMA. 2
// consumer warpgroups of 64 keys each multiply by WGMMA.
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
#include <initializer_list>
#include <type_traits>

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

namespace fagen_bwd_fp16_d128_causal_m64n128_varlen_kernel {

// ---- The schedule ----------------------------------------------------------------------------

using Element = __half;
using Pair = __half2;
using OutElement = Element;

constexpr int kWarpgroup = 128;
constexpr int kWarpgroupRows = 64;  // the M of every wgmma

constexpr int kHeadDim = 128;
constexpr int kHeadDimV = 128;
constexpr int kHeadDimPadded = 128;  // in shared memory, padded with zeros
constexpr int kHeadDimVPadded = 128;
constexpr int kBlockM = 64;    // rows of a step
constexpr int kBlockN = 128;   // keys of a thread block
constexpr int kCluster = 1;    // thread blocks of neighbouring keys, which have the same rows
constexpr int kStages = 2;     // Q buffers
constexpr int kDoStages = 2;   // dO buffers
constexpr int kDsStages = 2;   // dS buffers
constexpr int kConsumers = 2;  // warpgroups of 64 keys

constexpr int kThreads = 384;
constexpr int kLaunchRegisters = 168;
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
constexpr int kRowThreads = 256;  // of the kernels before and after
constexpr int kRowLanes = 16;     // of those, that share a row

constexpr int kQkSlab = 64;
constexpr int kVSlab = 64;
constexpr int kDsSlab = 64;
constexpr int kQkSwizzleBits = 3;
constexpr int kVSwizzleBits = 3;
constexpr int kDsSwizzleBits = 3;
constexpr auto kQkDescriptor = cute::SM90::GMMA::LayoutType::B128;
constexpr auto kVDescriptor = cute::SM90::GMMA::LayoutType::B128;
constexpr auto kDsDescriptor = cute::SM90::GMMA::LayoutType::B128;
constexpr int kStepK = 16;  // the K of every wgmma

constexpr int64_t kL2Share = 10485760;  // bytes of the L2 cache for Q, dO and dQ
constexpr int kMultiprocessors = 132;   // of the largest Hopper GPU
constexpr int kStepClocks = 3413;       // of a step, roughly

constexpr int kDqColumns = 64;     // that a warpgroup computes, of all rows
constexpr int kDqRowStep = 0;      // rows between the parts of dQ of two warpgroups
constexpr int kDqColumnStep = 64;  // and columns; of both one is 0
constexpr int kDqParts = 2;        // warpgroups that compute dQ
constexpr int kDqAdders = 2;       // threads that add it up, in turns
constexpr int kDqSlices = 1;       // in which each hands it on
constexpr int kLine = 128;         // of the L2 cache: additions that begin within one take longer

// A thread's part of a warpgroup's accumulators.
using Scores = float[kBlockM / 2];  // S, dP: 64 keys by kBlockM rows
using KeyGradient = float[kHeadDimPadded / 2];
using ValueGradient = float[kHeadDimVPadded / 2];
using QueryGradient = float[kDqColumns / 2];
using Packed = uint32_t[kBlockM / 4];  // P, dS in fp16

using Barrier = cutlass::arch::ClusterBarrier;
using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

template <class Integer>
__host__ __device__ constexpr Integer ceil_div(Integer a, Integer b) {
  return (a + b - 1) / b;
}

// One of the sequences that lie one after another: how many rows it has and keys it sees, behind
// which of all these it ends, how many keys it holds, seen or not, the first slot of its blocks of
// rows, and where a tile's part of dK and dV is kept if others have parts too.
struct Sequence {
  int seqlen_q, seqlen_k, end_q, end_k, held_k, first_slot, kept;
};

// kBlockN keys of one KV head with all of its query heads, and the blocks first … last - 1 of
// kBlockM rows that see some of them. Of the full ones every row sees all.
struct Tile {
  int first_key, kv_head, first_head, last_head, first, full_first, last;
};

enum : int { kRagged = 1 << 30 };  // rows of a tensor map, where every sequence ends

// Rows (total, heads, columns) in global memory.
template <class T>
struct Rows {
  T* data;
  int64_t stride_seq, stride_head;

  __device__ __forceinline__ T* at(int row, int head) const {
    return data + row * stride_seq + head * stride_head;
  }
};

// Numbers (heads, total) in global memory.
struct Numbers {
  const float* data;
  int64_t stride_head;

  __device__ __forceinline__ const float* of(int head) const { return data + head * stride_head; }
};

using Lengths = Sequence;

constexpr int kMachines = kMultiprocessors / kCluster;  // each of which has a tile at a time

// Tiles of a KV head in the order in which thread blocks take them, which is found before the main
// kernel: those with the most steps first, whichever sequence they are of. Of a sequence that is
// the order of its keys.
struct alignas(16) ListedTile {
  Sequence
      sequence;  // of a KV head what is kept, if other tiles have the rest of the group; else -1
  int first_key;
  uint16_t first_head, heads;  // of the group
};

struct alignas(16) TileList {
  int tiles;       // of a KV head
  int last_heads;  // of the last section
};

// Of a row tensor cores add two numbers to products of its: as sums of eight bf16, core matrices of
// eight rows side by side, first of one number and then of the other.
using Statistics = uint4[2 * kBlockM];

__device__ constexpr int lse_of(int row) {
  return row / 8 * 16 + row % 8;
}
__device__ constexpr int delta_of(int row) {
  return lse_of(row) + 8;
}

// A number as the sum of three bf16, which is all of its 24 bits, and of five zeros.
__device__ __forceinline__ uint4 in_parts(float number) {
  uint32_t part[3];
#pragma unroll
  for (uint32_t& bits : part) {
    bits = __float_as_uint(number) & 0xffff0000;
    number -= __uint_as_float(bits);
  }
  return {part[1] | part[0] >> 16, part[2] >> 16, 0, 0};
}

// What a share of a group's query heads gives to dV and dK of a tile, where several thread blocks
// have one each.
struct alignas(kLine) KeyBlock {
  float dv[kBlockN * kHeadDimVPadded];  // in the order of the threads' accumulators
  float dk[kBlockN * kHeadDimPadded];
};

// What there is of a block of rows in the workspace.
struct alignas(kLine) RowBlock {
  float dq[kBlockM * kHeadDimPadded];  // in the order of the threads' accumulators
  Statistics statistics;  // -LSE / scale, and -delta; where a row sees no key -2^127 and 0, so that
                          // its P is 0
  uint32_t added;         // 1 once dQ's first part is
};
static_assert(sizeof(RowBlock) == 34944, "the workspace outgrew the plan's formula");

// Tiles lie as slabs: columns of one swizzle span, all rows of a slab together.
struct SharedStorage {
  alignas(1024) Element k[kBlockN * kHeadDimPadded];
  alignas(1024) Element v[kBlockN * kHeadDimVPadded];
  alignas(1024) Element q[kStages][kBlockM * kHeadDimPadded];
  alignas(1024) Element dout[kDoStages][kBlockM * kHeadDimVPadded];
  alignas(1024) Element ds[kDsStages][kBlockN * kBlockM];  // transposed: keys along the rows
  alignas(1024) float dq[kBlockM * kHeadDimPadded / kCluster / kDqSlices];
  alignas(1024) Statistics statistics[kStages];
  alignas(1024) TransactionBarrier k_full;
  TransactionBarrier v_full;
  TransactionBarrier q_full[kStages];
  TransactionBarrier dout_full[kDoStages];
  Barrier q_empty[kStages];
  Barrier dout_empty[kDoStages];
  Barrier dq_full[kDqAdders][kDqParts];  // for each that adds, so that none misses a phase
  Barrier dq_empty[kDqParts];
  Sequence sequence;
};
constexpr int kSharedBytes = sizeof(SharedStorage);
static_assert(kSharedBytes <= 201728, "the layout outgrew the plan's ledger");

struct Params {
  CUtensorMap q, k, v, dout, dk, dv;
  Rows<const Element> out_rows, dout_rows;
  Rows<Element> dq_rows, dk_rows, dv_rows;
  Numbers lse;
  Numbers dlse;                 // dlse.data may be null
  RowBlock* row_blocks;         // (heads, m_slots)
  KeyBlock* key_blocks;         // parts of groups
  const int32_t* cu_seqlens_q;  // where sequences begin, and the last one ends
  const int32_t* cu_seqlens_k;  // the same of keys
  const int32_t* seqused_k;     // of how many keys each is to see the first ones; null: of all
  int offsets;                  // one more than there are sequences
  int total_q, total_k, kv_heads;
  int group;          // query heads of a KV head
  int m_slots;        // for blocks of rows of all sequences; see Slots
  int section_heads;  // KV heads whose Q, dO and dQ share the L2 cache
  float scale;        // of dQ and dK
  float scale_log2;   // of S, times log2(e)
  int first_head;  // of a launch of a kernel before or after, whose grid may not hold all of them
  TileList* list;
  ListedTile* listed;
  int most_tiles;  // of a KV head
  int most_kept;   // parts of dK and dV of a KV head; 0: no group is shared

  __device__ __forceinline__ RowBlock& row_block(int head, int slot) const {
    return row_blocks[head * m_slots + slot];  // no memory has room for more than an int counts
  }
};

__device__ __forceinline__ int lane() {
  return threadIdx.x % 32;
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const Pair pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ float2 unpack(uint32_t pair) {
  return __half22float2(reinterpret_cast<const Pair&>(pair));
}

// Hardware barriers, by number; 0 is __syncthreads.
enum NamedBarrier { kAllConsumers = 1, kStore };

__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
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

// ---- Tiles -----------------------------------------------------------------------------------

// The keys first … last - 1 that a row sees; none where last <= first. Both ends rise from row to
// row.
struct Keys {
  int first, last;
};

__host__ __device__ __forceinline__ Keys seen_by(const Lengths& lengths, int row) {
  const int seqlen_q = lengths.seqlen_q, seqlen_k = lengths.seqlen_k;
  return {0, min(seqlen_k, row + seqlen_k - seqlen_q + 1)};
}

// The first row whose keys are as a predicate says, as are those of all rows after it; seqlen_q if
// there is none.
template <class Predicate>
__device__ __forceinline__ int first_row_where(const Lengths& lengths, const Predicate& is_so) {
  int low = 0, high = lengths.seqlen_q;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (is_so(seen_by(lengths, middle))) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// The first row whose keys end after a key; seqlen_q if there is none.
__device__ __forceinline__ int first_row_past(const Lengths& lengths, int key) {
  return first_row_where(lengths, [&](const Keys& seen) { return seen.last > key; });
}

// The first block of keys that a block of rows sees.
__device__ __forceinline__ int first_tile_of(const Lengths&, int) {
  return 0;
}

// Where the blocks of rows end that see a tile's keys: all rows see the first key.
__device__ __forceinline__ void find_last(Tile& tile, const Lengths&, int, const int& m_blocks) {
  tile.last = m_blocks;
}

// How many blocks of keys a block of rows sees any of: so many parts its dQ has.
__device__ __forceinline__ int tiles_of(const Lengths& lengths, int m_block) {
  const int last_row = min((m_block + 1) * kBlockM, lengths.seqlen_q) - 1;
  return max(0, ceil_div(seen_by(lengths, last_row).last, kCluster * kBlockN) -
                    first_tile_of(lengths, m_block));
}

// The blocks of rows that see some of the keys from first_key on, which thread blocks of a cluster
// share; of the full ones every row sees all of a thread block's own.
__device__ __forceinline__ void find_blocks(Tile& tile, const Lengths& lengths, int first_key,
                                            const int& m_blocks) {
  const int first_row = first_row_past(lengths, first_key);
  tile.first = first_row < lengths.seqlen_q ? first_row / kBlockM : m_blocks;
  tile.full_first = ceil_div(first_row_past(lengths, tile.first_key + kBlockN - 1), kBlockM);
  find_last(tile, lengths, first_key, m_blocks);
}

// What the launch before this one wrote can be seen from here on.
__device__ __forceinline__ void wait_for_launch_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The launch after this one may begin once all thread blocks have come here.
__device__ __forceinline__ void let_next_launch_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Blocks of rows of all sequences have numbers without anyone counting them: sequence i, which
// begins at offsets[i - 1], does so at slot offsets[i - 1] / kBlockM + i, which leaves room for the
// blocks of those before it, and now and then for one more. The rows before all sequences are
// number 0, those behind them the last.
struct Slots {
  const int32_t* offsets;
  int count;

  __device__ __forceinline__ int first_of(int sequence) const {
    return sequence > 0 ? first_behind(sequence) : 0;
  }

  // The same of any but number 0.
  __device__ __forceinline__ int first_behind(int sequence) const {
    return max(0, __ldg(offsets + sequence - 1)) / kBlockM + sequence;
  }

  // Which sequence a slot is of. All lanes of a warp look for the same, at 32 sequences at a time.
  __device__ __forceinline__ int owner(int slot) const {
    int low = 0, high = count + 1;
    while (high - low > 1) {
      const int step = ceil_div(high - low, 33), at = low + (lane() + 1) * step;
      const uint32_t begun =
          __ballot_sync(0xffffffff, at < high && first_behind(min(at, count)) <= slot);
      const int passed = __ffs(~begun) - 1;  // 32 where all have
      low += (begun == 0xffffffff ? 32 : passed) * step;
      high = min(high, low + step);
    }
    return low;
  }
};

// Where a sequence lies. Whatever the lengths say, that is within the tensors. Rows of no sequence
// see no key, and no row sees keys of none.
__device__ __forceinline__ Sequence sequence_of(const Params& params, int index) {
  const bool begins = index > 0, ends = index < params.offsets;
  Sequence sequence;
  sequence.end_q =
      ends ? min(max(0, __ldg(params.cu_seqlens_q + index)), params.total_q) : params.total_q;
  sequence.seqlen_q =
      max(0, sequence.end_q - (begins ? max(0, __ldg(params.cu_seqlens_q + index - 1)) : 0));
  const int first_key = begins ? max(0, __ldg(params.cu_seqlens_k + index - 1)) : 0;
  const int last_key =
      ends ? min(max(0, __ldg(params.cu_seqlens_k + index)), params.total_k) : params.total_k;
  sequence.held_k = max(0, last_key - first_key);
  sequence.seqlen_k = begins && ends ? sequence.held_k : 0;
  if (params.seqused_k && begins && ends) {
    sequence.seqlen_k = min(sequence.held_k, max(0, __ldg(params.seqused_k + index - 1)));
  }
  sequence.end_k = first_key + sequence.seqlen_k;
  sequence.first_slot = Slots{params.cu_seqlens_q, params.offsets}.first_of(index);
  return sequence;
}

// ---- The order of tiles ----------------------------------------------------------------------

// Of how many steps a tile is, roughly: the longer, the lower.
__device__ __forceinline__ int class_of(int steps) {
  const int exponent = 31 - __clz(steps);
  return kRowThreads - 1 -
         (exponent < 3 ? steps : (exponent - 2) * 8 + (steps >> (exponent - 3)) % 8);
}

// The fewest steps of a tile of a class.
__device__ __forceinline__ int steps_of(int own_class) {
  const int rank = kRowThreads - 1 - own_class;
  return rank < 8 ? rank : (8 + rank % 8) << (rank / 8 - 1);
}

// In how many steps of a head there are rows that see keys from first_key on.
__device__ __forceinline__ int steps_from(const Sequence& sequence, int first_key) {
  const int first_row = first_row_past(sequence, first_key);
  return first_row < sequence.seqlen_q ? ceil_div(sequence.seqlen_q, kBlockM) - first_row / kBlockM
                                       : 0;
}

constexpr int kKeys = kCluster * kBlockN;  // of a listed tile
constexpr float
    kSumming = 3500,
    kSummedBytes = 1400;  // what a sum of parts of dK and dV takes, in clocks, and its bytes in one

// Lists tiles, by a thread block with a thread for each class.
struct TileLister {
  const Params& params;
  uint32_t (
      &places)[kRowThreads];  // how many tiles there are of a class, then where the next one goes
  uint32_t& kept;             // parts of dK and dV, of a KV head
  int long_steps = 0;  // of all query heads of a tile, from which on longer tiles go before others
  int share_heads = params.group;  // of a group, where a sequence's tiles are shared out
  int most_steps = 1 << 30;        // of a head, of tiles that are not

  // Goes through sequences: a warp has some at a time, a lane one of them.
  template <class Visit>
  __device__ __forceinline__ void for_sequences(const Visit& visit) const {
    const int sequences = params.offsets + 1,
              width = min(32, ceil_div(sequences, kRowThreads / 32));
    for (int first = threadIdx.x / 32 * width; first < sequences;
         first += kRowThreads / 32 * width) {
      const int index = min(first + lane(), params.offsets);
      const Sequence own = sequence_of(params, index);
      visit(index, own,
            lane() < width && first + lane() < sequences ? ceil_div(own.held_k, kKeys) : 0);
    }
  }

  // How many there are of all tiles of a head, or so: from the first of a sequence to its last one
  // they are ever fewer.
  __device__ __forceinline__ void count_steps(uint32_t& steps_of_all) const {
    uint32_t steps = 0;
    for_sequences([&](int, const Sequence& own, int tiles) {
      if (tiles > 0) {
        steps += tiles * (steps_from(own, 0) + steps_from(own, (tiles - 1) * kKeys)) / 2;
      }
    });
    atomicAdd(&steps_of_all, steps);
  }

  // Gives each tile a place among those of its class, in the order of its sequence's keys: counts
  // how many there are of each, and once `places` say from where each class begins, lists them.
  template <bool lists>
  __device__ __forceinline__ void place_tiles() {
    for_sequences([&](int index, const Sequence& own, int tiles) {
      const int most = steps_from(own, 0);
      const bool is_shared = share_heads < params.group && most > most_steps;
      const int own_heads = is_shared ? share_heads : params.group,
                shares = ceil_div(params.group, own_heads);
      const int own_kept = !is_shared ? -1
                           : lists    ? int(atomicAdd(&kept, uint32_t(tiles * shares)))
                                      : 0;
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
        const int heads = __shfl_sync(0xffffffff, own_heads, owner),
                  of_tile = ceil_div(params.group, heads);
        const int first_key = rank / of_tile * kKeys, first_head = rank % of_tile * heads;
        const int first_kept = __shfl_sync(0xffffffff, own_kept, owner),
                  sequence_index = __shfl_sync(0xffffffff, index, owner);
        Sequence sequence;
        sequence.seqlen_q = __shfl_sync(0xffffffff, own.seqlen_q, owner);
        sequence.seqlen_k = __shfl_sync(0xffffffff, own.seqlen_k, owner);
        // tiles of a sequence follow each other, which share its rows in the L2 cache, but for long
        // ones
        const int of_first = __shfl_sync(0xffffffff, most, owner) * heads,
                  steps = heads * steps_from(sequence, first_key);
        const int own_class = class_of(steps > long_steps ? steps : min(of_first, long_steps));
        const bool is_one = number < count;
        // neighbours of one sequence and class take their places together
        const int before_owner = __shfl_up_sync(0xffffffff, owner, 1),
                  before_class = __shfl_up_sync(0xffffffff, own_class, 1);
        const bool begins =
            lane() == 0 || !is_one || owner != before_owner || own_class != before_class;
        const uint32_t begun = __ballot_sync(0xffffffff, begins),
                       up_to = 0xffffffff >> (31 - lane());
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

  // Shares the groups of long sequences out where a tile of theirs takes long beside an even part
  // of all work: in two or four, if there is room for what is kept, and if that is sooner than to
  // leave them whole.
  __device__ __forceinline__ void share_out(uint32_t steps_of_all, uint32_t& long_tiles,
                                            uint32_t& longest) {
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
      const int heads = ceil_div(params.group, shares),
                parts = ceil_div(params.group, heads) * long_tiles;
      const float summing = shares > 1 ? kSumming + 2.f * sizeof(KeyBlock) / kSummedBytes * parts *
                                                        params.kv_heads * kCluster
                                       : 0.f;
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
  const float even =
      float(steps_of_all) * params.group / kMachines;  // what each has to do of a KV head
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
  const bool fit = tiles <= params.most_tiles;  // not where offsets fall: then there are none,
                                                // since tiles wait for each other
  __syncthreads();
  places[threadIdx.x] = begin;
  if (threadIdx.x == 0 && (!fit || tiles == 0)) {
    *params.list = {};
  } else if (fit && own > 0 && begin == 0) {  // those of the most steps
    // two of their length for each SM, and tiles for two rounds and a half
    const int rounds = ceil_div(5 * kMachines / 2, tiles);
    *params.list = {tiles,
                    max(rounds, int(min(1e6f, 2.f * steps_of(threadIdx.x) / max(1.f, even))) + 1)};
  }
  __syncthreads();
  if (fit) {
    lister.place_tiles<true>();
  }
}

// A thread block's tile, as listed, and its sequence. Heads in sections, so that what their tiles
// read stays in the L2 cache; the last one has work enough for its long tiles to end in time.
__device__ __forceinline__ Tile tile_of(const Params& params, const TileList& list,
                                        Sequence& sequence) {
  const int last_heads = min(list.last_heads, params.kv_heads),
            sections = (params.kv_heads - last_heads) / params.section_heads;
  const int index = blockIdx.x / kCluster,
            section = min(index / (params.section_heads * list.tiles), sections);
  const int first_head = section * params.section_heads,
            heads = section < sections ? params.section_heads : params.kv_heads - first_head;
  const int rank = index - first_head * list.tiles, place = rank / heads;
  const ListedTile listed = params.listed[place];
  sequence = listed.sequence;
  Tile tile;
  tile.first_key = listed.first_key;
  tile.kv_head = first_head + rank - place * heads;
  tile.first_head = tile.kv_head * params.group + listed.first_head;
  tile.last_head = tile.first_head + listed.heads;
  sequence.kept =
      sequence.kept < 0 ? -1 : (sequence.kept * params.kv_heads + tile.kv_head) * kCluster;
  find_blocks(tile, sequence, listed.first_key, ceil_div(sequence.seqlen_q, kBlockM));
  return tile;
}

__device__ __forceinline__ const Lengths& lengths_of(const Params&, const SharedStorage& shared) {
  return shared.sequence;
}

// Of a tile's rows of a head.
__device__ __forceinline__ RowBlock& row_block_of(const Params& params, const SharedStorage& shared,
                                                  const Tile&, int head, int block) {
  return params.row_block(head, shared.sequence.first_slot + block);
}

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

// For a tile whose columns are M or N, as it lies: from slab to slab of `rows` rows.
template <int rows, int slab>
__device__ __forceinline__ Descriptor along_columns(const Element* tile,
                                                    cute::SM90::GMMA::LayoutType layout) {
  return descriptor<slab>(tile, layout, rows * slab * sizeof(Element));
}

// From such a descriptor to that of the k-th row.
template <int slab>
__device__ constexpr uint32_t row_offset(int k) {
  return k * slab * sizeof(Element) >> 4;
}

// S or dP, to begin with: of numbers of rows.
template <bool accumulate>
__device__ __forceinline__ void wgmma_statistics(float (&c)[32], const uint32_t* a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 }, "
      "{ %32, %33, %34, %35 }, %36, %37, 1, 1, 0;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()), "n"(accumulate ? 1 : 0));
}

// S, or dP: keys by rows, both operands as they lie.
template <bool accumulate>
__device__ __forceinline__ void wgmma_scores(float (&c)[32], Descriptor a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 }, "
      "%32, %33, %34, 1, 1, 0, 0;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
      : "l"(a.bits()), "l"(b.bits()), "n"(accumulate ? 1 : 0));
}

// dV, or dK if it is as wide: P by dO, dS by Q.
template <bool accumulate>
__device__ __forceinline__ void wgmma_gradient(float (&c)[64], const uint32_t* a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
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

// dQ: dS by K, dS as it lies transposed.
template <bool accumulate>
__device__ __forceinline__ void wgmma_dq(float (&c)[32], Descriptor a, Descriptor b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{ %0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31 }, "
      "%32, %33, %34, 1, 1, 1, 1;"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
      : "l"(a.bits()), "l"(b.bits()), "n"(accumulate ? 1 : 0));
}

// Adds up what tiles of the same keys found of 64 rows of dK or dV, always in the order of their
// heads, and rounds that.
template <int columns, int padded>
__device__ __forceinline__ void sum_rows(const Params& params, const float* first, int shares,
                                         const Rows<Element>& to, int row, int rows, int head,
                                         float scale) {
  const int64_t share_stride =
      int64_t(sizeof(KeyBlock) / sizeof(float4)) * kCluster * params.kv_heads;
  __shared__ uint32_t rounded[kWarpgroupRows][padded / 2 + 4];
#pragma unroll 2  // few registers
  for (int i = threadIdx.x; i < kWarpgroupRows * padded / 4; i += kRowThreads) {
    // four neighbours of a thread's accumulator, as of dQ
    const int thread = i % kWarpgroup, own = thread / 32 * 16 + thread % 32 / 4,
              pair = i / kWarpgroup * 4 + thread % 4;
    float4 sum = {};
#pragma unroll 1
    for (int share = 0; share < shares; ++share) {
      const float4 x = reinterpret_cast<const float4*>(first)[share * share_stride + i];
      sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
    }
    rounded[own][pair] = pack(sum.x * scale, sum.y * scale);
    rounded[own + 8][pair] = pack(sum.z * scale, sum.w * scale);
  }
  __syncthreads();
  constexpr int kLoads = columns * sizeof(Element) / 16;  // of a row
  for (int i = threadIdx.x; i < min(kWarpgroupRows, rows) * kLoads; i += kRowThreads) {
    reinterpret_cast<uint4*>(to.at(row + i / kLoads, head))[i % kLoads] =
        *reinterpret_cast<const uint4*>(&rounded[i / kLoads][i % kLoads * 4]);
  }
  __syncthreads();  // what is rounded next takes the same space
}

// Of a listed tile, if it is the first of several with the same keys; thread blocks of all heads of
// a group take 64 keys each, in turns.
__device__ __forceinline__ void sum_shares(const Params& params, int place, int head) {
  if (place >= params.list->tiles) {
    return;
  }
  const ListedTile listed = params.listed[place];
  const Sequence& sequence = listed.sequence;
  if (sequence.kept < 0 || listed.first_head > 0) {
    return;
  }
  const int kv_head = head / params.group, shares = ceil_div(params.group, int(listed.heads));
  const KeyBlock* const first =
      params.key_blocks + (int64_t(sequence.kept) * params.kv_heads + kv_head) * kCluster;
  const int keys = min(kCluster * kBlockN, sequence.held_k - listed.first_key),
            first_row = sequence.end_k - sequence.seqlen_k + listed.first_key;
  for (int key = head % params.group * kWarpgroupRows; key < keys;
       key += params.group * kWarpgroupRows) {
    const KeyBlock& own = first[key / kBlockN];
    const int row = key % kBlockN;
    sum_rows<kHeadDimV, kHeadDimVPadded>(params, own.dv + row * kHeadDimVPadded, shares,
                                         params.dv_rows, first_row + key, keys - key, kv_head, 1.f);
    sum_rows<kHeadDim, kHeadDimPadded>(params, own.dk + row * kHeadDimPadded, shares,
                                       params.dk_rows, first_row + key, keys - key, kv_head,
                                       params.scale);
  }
}

// ---- Rows, before and after ------------------------------------------------------------------

// A block of rows of a head, in the sequence that its slot is of.
struct BlockOfRows {
  int slot, head, m_block;
  Sequence sequence;
  int begin;  // of the sequence

  // A slot may have no block of rows.
  __device__ __forceinline__ bool exists() const {
    return m_block >= 0 && m_block * kBlockM < sequence.seqlen_q;
  }

  // Rows from its first one to the end of the sequence.
  __device__ __forceinline__ int left() const { return sequence.seqlen_q - m_block * kBlockM; }

  __device__ __forceinline__ RowBlock& record(const Params& params) const {
    return params.row_block(head, slot);
  }

  __device__ __forceinline__ const Sequence& lengths(const Params&) const { return sequence; }

  template <class T>
  __device__ __forceinline__ T* row(const Rows<T>& rows, int query) const {
    return rows.at(begin + query, head);
  }

  __device__ __forceinline__ float number(const Numbers& numbers, int query) const {
    return numbers.of(head)[begin + query];
  }
};

// The one that a thread block before or after has; the first of those before, which lists tiles,
// has none.
__device__ __forceinline__ BlockOfRows own_block_of_rows(const Params& params) {
  const Slots slots = {params.cu_seqlens_q, params.offsets};
  const int slot = int(blockIdx.x) + params.m_slots - int(gridDim.x);
  const int head = params.first_head + blockIdx.y, index = slots.owner(slot),
            m_block = slot - slots.first_of(index);
  const Sequence sequence = sequence_of(params, index);
  return {slot, head, m_block, sequence, sequence.end_q - sequence.seqlen_q};
}

// Sums of dQ begin at none.
__device__ __forceinline__ void clear(RowBlock& record) {
  if (threadIdx.x == 0) {
    record.added = 0;
  }
}

// Each row's delta = sum of dO * O, less its dLSE, and its LSE.
__device__ __forceinline__ void prepare(const Params& params, const BlockOfRows& own,
                                        RowBlock& record) {
  constexpr int kLoad = 16 / sizeof(Element);  // elements
  const int column = threadIdx.x % kRowLanes * kLoad, seqlen_q = own.lengths(params).seqlen_q;
#pragma unroll
  for (int row = threadIdx.x / kRowLanes; row < kBlockM; row += kRowThreads / kRowLanes) {
    const int query = own.m_block * kBlockM + row;
    float delta = 0.f;
    if (query < seqlen_q && column < kHeadDimV) {
      const uint4 a = *reinterpret_cast<const uint4*>(own.row(params.out_rows, query) + column);
      const uint4 b = *reinterpret_cast<const uint4*>(own.row(params.dout_rows, query) + column);
#pragma unroll
      for (int i = 0; i < kLoad / 2; ++i) {
        const float2 x = unpack(reinterpret_cast<const uint32_t*>(&a)[i]);
        const float2 y = unpack(reinterpret_cast<const uint32_t*>(&b)[i]);
        delta = fmaf(x.y, y.y, fmaf(x.x, y.x, delta));
      }
    }
#pragma unroll
    for (int other = kRowLanes / 2; other > 0; other /= 2) {
      delta += __shfl_xor_sync(0xffffffff, delta, other);
    }
    if (threadIdx.x % kRowLanes == 0) {
      const float lse = query < seqlen_q ? own.number(params.lse, query) : -INFINITY;
      if (lse > -INFINITY && params.dlse.data) {
        delta -= own.number(params.dlse, query);
      }
      const float reference = lse > -INFINITY ? lse * 1.44269504089f : INFINITY;
      const float subtracted = reference / params.scale_log2;
      record.statistics[lse_of(row)] = in_parts(subtracted > 0x1p127f ? -0x1p127f : -subtracted);
      record.statistics[delta_of(row)] = in_parts(lse > -INFINITY ? -delta : 0.f);
    }
  }
}

// Before the main kernel.
__global__ void __launch_bounds__(kRowThreads) prepare_rows(const __grid_constant__ Params params) {
  let_next_launch_begin();
  if (blockIdx.x == 0) {
    if (params.first_head + blockIdx.y == 0) {
      list_tiles(params);
    }
    return;
  }
  const BlockOfRows own = own_block_of_rows(params);
  RowBlock& record = own.record(params);
  clear(record);
  if (!own.exists()) {
    return;
  }
  prepare(params, own, record);
}

// After the main kernel: scale and round the sums of dq, by way of shared memory.
__global__ void __launch_bounds__(kRowThreads) round_dq(const __grid_constant__ Params params) {
  if (blockIdx.x + params.m_slots < gridDim.x) {
    sum_shares(params, blockIdx.x, params.first_head + blockIdx.y);
    return;
  }
  const BlockOfRows own = own_block_of_rows(params);
  if (!own.exists()) {
    return;
  }
  const float4* sums = reinterpret_cast<const float4*>(own.record(params).dq);
  const bool seen =
      tiles_of(own.lengths(params), own.m_block) > 0;  // nobody has sums of rows that see no key
  __shared__ uint32_t rounded[kBlockM][kHeadDimPadded / 2 + 4];
  for (int i = threadIdx.x; i < kBlockM * kHeadDimPadded / 4; i += kRowThreads) {
    const int thread = i % kWarpgroup, eight = i / kWarpgroup % (kDqColumns / 8),
              warpgroup = i / (kWarpgroup * kDqColumns / 8);
    // four neighbours of a thread's accumulator: two columns of a row, and of that eight below
    const int row = warpgroup * kDqRowStep + thread / 32 * 16 + thread % 32 / 4;
    const int pair = warpgroup * kDqColumnStep / 2 + eight * 4 + thread % 4;
    const float4 sum = seen && row < own.left() ? sums[i] : float4{};
    rounded[row][pair] = pack(sum.x * params.scale, sum.y * params.scale);
    rounded[row + 8][pair] = pack(sum.z * params.scale, sum.w * params.scale);
  }
  __syncthreads();
  constexpr int kLoads = kHeadDim * sizeof(Element) / 16;  // of a row
  for (int i = threadIdx.x; i < kBlockM * kLoads; i += kRowThreads) {
    const int row = i / kLoads, query = own.m_block * kBlockM + row;
    if (query < own.lengths(params).seqlen_q) {
      reinterpret_cast<uint4*>(own.row(params.dq_rows, query))[i % kLoads] =
          *reinterpret_cast<const uint4*>(&rounded[row][i % kLoads * 4]);
    }
  }
}

// ---- Loading ---------------------------------------------------------------------------------

// Copies tiles from global to shared memory. Used by a single thread.
struct Loader {
  const Params& params;
  SharedStorage& shared;

  // One box per slab; rows past the sequence and columns past the head dim are filled with zeros.
  template <int columns, int rows, int slab>
  __device__ __forceinline__ void copy(const CUtensorMap& map, TransactionBarrier& full,
                                       Element* tile, int row, int head, int seqlen, int end,
                                       cute::TMA::CacheHintSm90 hint) {
#pragma unroll 1  // few registers
    for (int column = 0; column < columns; column += slab) {
      cute::SM90_TMA_LOAD_5D::copy(&map, reinterpret_cast<uint64_t*>(&full),
                                   static_cast<uint64_t>(hint), tile + column * rows, column,
                                   kRagged - seqlen + row, head, kRagged, end);
    }
  }

  // A tile's keys, which nobody needs again.
  template <int columns, int slab>
  __device__ __forceinline__ void copy_keys(const CUtensorMap& map, TransactionBarrier& full,
                                            Element* to, const Tile& tile) {
    copy<columns, kBlockN, slab>(map, full, to, tile.first_key, tile.kv_head,
                                 shared.sequence.seqlen_k, shared.sequence.end_k,
                                 cute::TMA::CacheHintSm90::EVICT_FIRST);
  }

  // A block of rows, which tiles of other keys need too.
  template <int columns, int slab>
  __device__ __forceinline__ void copy_rows(const CUtensorMap& map, TransactionBarrier& full,
                                            Element* to, const Tile&, int head, int block) {
    copy<columns, kBlockM, slab>(map, full, to, block * kBlockM, head, shared.sequence.seqlen_q,
                                 shared.sequence.end_q, cute::TMA::CacheHintSm90::EVICT_LAST);
  }

  __device__ __forceinline__ void load_k(const Tile& tile) {
    shared.k_full.arrive_and_expect_tx(sizeof(shared.k));
    copy_keys<kHeadDimPadded, kQkSlab>(params.k, shared.k_full, shared.k, tile);
  }

  static constexpr uint32_t kQBytes = sizeof(SharedStorage::q[0]) + sizeof(Statistics);
  static constexpr uint32_t kDoutBytes = sizeof(SharedStorage::dout[0]);

  // Q of a block of rows, and their statistics; the barrier waits for so many bytes.
  __device__ __forceinline__ void load_q(RingPosition<kStages>& q, const Tile& tile, int head,
                                         int block, uint32_t bytes) {
    const RowBlock& rows = row_block_of(params, shared, tile, head, block);
    shared.q_empty[q.stage].wait(q.phase ^ 1);
    shared.q_full[q.stage].arrive_and_expect_tx(bytes);
    copy_rows<kHeadDimPadded, kQkSlab>(params.q, shared.q_full[q.stage], shared.q[q.stage], tile,
                                       head, block);
    cute::SM90_BULK_COPY_G2S::copy(rows.statistics,
                                   reinterpret_cast<uint64_t*>(&shared.q_full[q.stage]),
                                   shared.statistics[q.stage], sizeof(Statistics));
  }

  // And dO.
  __device__ __forceinline__ void load_dout(RingPosition<kDoStages>& dout, const Tile& tile,
                                            int head, int block, uint32_t bytes) {
    shared.dout_empty[dout.stage].wait(dout.phase ^ 1);
    shared.dout_full[dout.stage].arrive_and_expect_tx(bytes);
    copy_rows<kHeadDimVPadded, kVSlab>(params.dout, shared.dout_full[dout.stage],
                                       shared.dout[dout.stage], tile, head, block);
  }

  __device__ __forceinline__ void run(const Tile& tile) {
    RingPosition<kStages> q;
    RingPosition<kDoStages> dout;
    load_k(tile);
    shared.v_full.arrive_and_expect_tx(sizeof(shared.v));
    copy_keys<kHeadDimVPadded, kVSlab>(params.v, shared.v_full, shared.v, tile);
    for (int block = tile.last - 1; block >= tile.first; --block) {
#pragma unroll 1
      for (int head = tile.first_head; head < tile.last_head; ++head) {
        load_q(q, tile, head, block, kQBytes);
        q.advance();
        load_dout(dout, tile, head, block, kDoutBytes);
        dout.advance();
      }
    }
  }
};

// ---- Adding dQ up ----------------------------------------------------------------------------

// Adds to global memory; reads shared memory as TMA does.
__device__ __forceinline__ void bulk_add(float* to, const float* from, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(cute::cast_smem_ptr_to_uint(from)), "r"(bytes)
      : "memory");
}

// The same, of what nobody has added to yet.
__device__ __forceinline__ void bulk_store(float* to, const float* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(cute::cast_smem_ptr_to_uint(from)), "r"(bytes)
               : "memory");
}

// Until all that this thread has added is in global memory.
__device__ __forceinline__ void await_additions() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ uint32_t acquire(const uint32_t* added) {
  uint32_t now;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(added) : "memory");
  return now;
}

// Until so many were counted: what they added is there, and TMA may add to it.
__device__ __forceinline__ void await_count(const uint32_t* added, uint32_t count) {
  while (int(acquire(added) - count) < 0) {
  }
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Counts one more, for what this thread has added.
__device__ __forceinline__ void release(uint32_t* added) {
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(added) : "memory");
}

// Which of the parts of a block of rows a tile has: so many come before it.
__device__ __forceinline__ int turn_of(const Lengths& lengths, const Tile& tile, int block) {
  return tile.first_key / (kCluster * kBlockN) - first_tile_of(lengths, block);
}

// Adds a part of a block's dQ, or stores the first one, so that nobody has to clear the sums.
__device__ __forceinline__ void add(float* to, const float* from, int count, int turn) {
  if (turn == 0) {
    bulk_store(to, from, count * sizeof(float));
  } else {
    bulk_add(to, from, count * sizeof(float));
  }
}

// How many numbers of dQ a warpgroup has.
__device__ constexpr int dq_part(int) {
  return kWarpgroupRows * kDqColumns;
}

// The sums of a block of rows, and the counter of what has been added to them.
__device__ __forceinline__ float* sums_of(RowBlock& record) {
  return record.dq;
}
__device__ __forceinline__ uint32_t* counter_of(RowBlock& record) {
  return &record.added;
}

// Parts of dQ are added up in any order but for the first, which is stored. A tile waits for tiles
// only that were begun before it.
__device__ __forceinline__ void await_turn(const uint32_t* added, int turn) {
  await_count(added, min(turn, 1));
}

__device__ __forceinline__ void end_turn(uint32_t* added, int turn) {
  if (turn == 0) {
    await_additions();
    release(added);
  }
}

// Used by two threads of different warps, which take turns: one waits for others, or until its
// additions are known, while the other adds.
__device__ __forceinline__ void add_dq(const Params& params, SharedStorage& shared,
                                       const Tile& tile, int adder) {
  Barrier* const full = shared.dq_full[adder];
  uint32_t phase = 0;
  int step = adder;
  const int steps = tile.last_head - tile.first_head;
  for (int block = tile.last - 1; block >= tile.first; --block) {
#pragma unroll 1  // few registers
    for (; step < steps; step += kDqAdders) {
      const int head = tile.first_head + step,
                turn = turn_of(lengths_of(params, shared), tile, block);
      RowBlock& record = row_block_of(params, shared, tile, head, block);
      float* const sums = sums_of(record);
      uint32_t* const added = counter_of(record);
      await_turn(added, turn);  // before the part is there
#pragma unroll
      for (int slice = 0; slice < kDqSlices; ++slice) {
#pragma unroll
        for (int part = 0; part < kDqParts; ++part) {
          full[part].wait(phase);
          const int begin = part * dq_part(0), count = dq_part(part) / kDqSlices;
          add(sums + begin + slice * count, shared.dq + begin / kDqSlices, count, turn);
        }
        cute::tma_store_arrive();
        cute::tma_store_wait<0>();  // it has been read
#pragma unroll
        for (int part = 0; part < kDqParts; ++part) {
          shared.dq_empty[part].arrive();
        }
      }
      phase ^= 1;
      end_turn(added, turn);
    }
    step -= steps;
  }
  await_additions();
}

// ---- Multiplying -----------------------------------------------------------------------------

// A warpgroup that multiplies.
struct Consumer {
  const Params& params;
  SharedStorage& shared;
  const int warpgroup;  // 0 … kConsumers - 1

  // Rings of as many buffers go round together: registers are scarce.
  RingPosition<kStages> q;
  __device__ __forceinline__ RingPosition<kDoStages> dout() const { return q; }
  __device__ __forceinline__ RingPosition<kDsStages> ds() const { return q; }

  __device__ __forceinline__ void advance() { q.advance(); }

  // Who adds the dQ of a step up: steps are even and odd as the stages of dS are.
  __device__ __forceinline__ int adder() const { return ds().stage; }

  // The first of its 64 keys in the tile.
  __device__ __forceinline__ int first_row() const { return warpgroup * kWarpgroupRows; }

  // One arrival per warp, since wgmma completes per warp, for what all of its lanes have read and
  // written.
  __device__ __forceinline__ void arrive(Barrier& barrier) {
    __syncwarp();
    if (lane() == 0) {
      barrier.arrive();
    }
  }

  // Issues what S and dP - delta begin with: ones by the parts of -lse and of -delta. Before all
  // other products of a step, since one with registers on the left waits for those under way.
  __device__ __forceinline__ void issue_statistics(Scores& s, Scores& dp) {
    // halves of the 16 columns of core matrices, of which three are parts
    const uint32_t ones = lane() % 4 == 0 ? 0x3f803f80 : lane() % 4 == 1 ? 0x3f80 : 0;
    uint32_t first_half[4] = {ones, ones, 0, 0}, second_half[4] = {0, 0, ones, ones};
    const Descriptor rows =
        descriptor<16>(reinterpret_cast<const Element*>(shared.statistics[q.stage]),
                       cute::SM90::GMMA::LayoutType::INTERLEAVE, 128);
    fence_operand(first_half);
    fence_operand(second_half);
    fence_operand(s);
    fence_operand(dp);
    wgmma_fence();
    wgmma_statistics<false>(s, first_half, rows);
    wgmma_statistics<false>(dp, second_half, rows);
  }

  // Issues S = K Qᵀ - lse, of the Q in a stage.
  __device__ __forceinline__ void issue_scores(Scores& s, int stage) {
    const Descriptor keys = descriptor<kQkSlab>(shared.k + first_row() * kQkSlab, kQkDescriptor);
    const Descriptor rows = descriptor<kQkSlab>(shared.q[stage], kQkDescriptor);
#pragma unroll
    for (int d = 0; d < kHeadDimPadded; d += kStepK) {
      wgmma_scores<true>(s, keys + column_offset<kBlockN, kQkSlab>(d),
                         rows + column_offset<kBlockM, kQkSlab>(d));
    }
    wgmma_commit();
  }

  // Issues dP - delta = V dOᵀ - delta.
  __device__ __forceinline__ void issue_dp(Scores& dp) {
    const Descriptor keys = descriptor<kVSlab>(shared.v + first_row() * kVSlab, kVDescriptor);
    const Descriptor rows = descriptor<kVSlab>(shared.dout[dout().stage], kVDescriptor);
#pragma unroll
    for (int d = 0; d < kHeadDimVPadded; d += kStepK) {
      wgmma_scores<true>(dp, keys + column_offset<kBlockN, kVSlab>(d),
                         rows + column_offset<kBlockM, kVSlab>(d));
    }
    wgmma_commit();
  }

  // P, in place of S.
  template <bool masked>
  __device__ __forceinline__ void exponentiate(const Tile& tile, int block, Scores& s) {
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) {
      s[i] = exp2_approx(s[i] * params.scale_log2);
    }
    if (masked) {
      const int key = tile.first_key + first_row() + thread_row();
      const int row = block * kBlockM + lane() % 4 * 2;
#pragma unroll
      for (int i = 0; i < kBlockM / 2; ++i) {
        const Keys seen = seen_by(lengths_of(params, shared), row + column_of(i));
        const int own = key + row_of(i) * 8;
        if (own >= seen.last) {
          s[i] = 0.f;
        }
      }
    }
  }

  __device__ __forceinline__ void pack_scores(Packed& packed, const Scores& s) {
#pragma unroll
    for (int i = 0; i < kBlockM / 4; ++i) {
      packed[i] = pack(s[2 * i], s[2 * i + 1]);
    }
  }

  // dS = P (dP - delta), in place of dP - delta.
  __device__ __forceinline__ void differentiate(const Scores& p, Scores& dp) {
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) {
      dp[i] *= p[i];
    }
  }

  // A warp's 16 rows of dS, for the GEMM that needs it from shared memory.
  __device__ __forceinline__ void store_ds(const Packed& packed) {
    const int row = first_row() + warp_row() + lane() % 16;
#pragma unroll
    for (int column = 0; column < kBlockM; column += 16) {
      char* slab =
          reinterpret_cast<char*>(shared.ds[ds().stage] + column / kDsSlab * kBlockN * kDsSlab);
      const uint32_t* four = packed + column / 4;
      store_matrices(
          slab + swizzled<kDsSlab, kDsSwizzleBits>(row, column % kDsSlab + lane() / 16 * 8),
          four[0], four[1], four[2], four[3]);
    }
  }

  // Issues dV += P dO.
  __device__ __forceinline__ void issue_dv(ValueGradient& dv, Packed& p) {
    const Descriptor rows = along_columns<kBlockM, kVSlab>(shared.dout[dout().stage], kVDescriptor);
    fence_operand(p);
    fence_operand(dv);
    wgmma_fence();
#pragma unroll
    for (int row = 0; row < kBlockM; row += kStepK) {
      wgmma_gradient<true>(dv, p + row / 4, rows + row_offset<kVSlab>(row));
    }
    wgmma_commit();
  }

  // Issues dK += dS Q.
  __device__ __forceinline__ void issue_dk(KeyGradient& dk, Packed& d_scores) {
    const Descriptor rows = along_columns<kBlockM, kQkSlab>(shared.q[q.stage], kQkDescriptor);
    fence_operand(d_scores);
    fence_operand(dk);
    wgmma_fence();
#pragma unroll
    for (int row = 0; row < kBlockM; row += kStepK) {
      wgmma_gradient<true>(dk, d_scores + row / 4, rows + row_offset<kQkSlab>(row));
    }
    wgmma_commit();
  }

  // Issues a part of dQ, of two operands with keys along their rows.
  template <int slab_a, int slab_b, int count>
  __device__ __forceinline__ void multiply_dq(float (&dq)[count], Descriptor a, Descriptor b) {
    fence_operand(dq);
    wgmma_fence();
    wgmma_dq<false>(dq, a, b);
#pragma unroll
    for (int key = kStepK; key < kBlockN; key += kStepK) {
      wgmma_dq<true>(dq, a + row_offset<slab_a>(key), b + row_offset<slab_b>(key));
    }
    wgmma_commit();
  }

  // Issues dQ = dS K: of some rows, or some columns of K.
  template <int count>
  __device__ __forceinline__ void issue_dq(float (&dq)[count], const Element* rows,
                                           const Element* columns) {
    multiply_dq<kDsSlab, kQkSlab>(dq, along_columns<kBlockN, kDsSlab>(rows, kDsDescriptor),
                                  along_columns<kBlockN, kQkSlab>(columns, kQkDescriptor));
  }

  // Leaves 64 rows of a gradient as they are, where other thread blocks have the rest of the group.
  template <int all, int count>
  __device__ __forceinline__ void keep(float (&share)[all], const float (&gradient)[count]) {
    float4* to =
        reinterpret_cast<float4*>(share) + first_row() * count / 2 + threadIdx.x % kWarpgroup;
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      to[i / 4 * kWarpgroup] = {gradient[i], gradient[i + 1], gradient[i + 2], gradient[i + 3]};
    }
  }

  __device__ __forceinline__ KeyBlock& share_of(const Tile&) const {
    return params.key_blocks[shared.sequence.kept];
  }

  // Rounds 64 rows of a gradient to a tile in shared memory.
  template <int columns, int slab, int swizzle_bits, int count>
  __device__ __forceinline__ void round_rows(Element* space, const float (&gradient)[count],
                                             float scale) {
    const int row = first_row() + warp_row() + lane() % 16;
#pragma unroll
    for (int column = 0; column < columns; column += 16) {
      char* base = reinterpret_cast<char*>(space + column / slab * kBlockN * slab);
      const float* x = gradient + column / 2;
      store_matrices(base + swizzled<slab, swizzle_bits>(row, column % slab + lane() / 16 * 8),
                     pack(x[0] * scale, x[1] * scale), pack(x[2] * scale, x[3] * scale),
                     pack(x[4] * scale, x[5] * scale), pack(x[6] * scale, x[7] * scale));
    }
    cutlass::arch::fence_view_async_shared();
  }

  // Copies 64 rows of some columns of a tile to global memory; of keys that are not seen the
  // gradient too.
  __device__ __forceinline__ void copy_rows(const CUtensorMap& map, const Element* from, int column,
                                            const Tile& tile) {
    const Sequence& sequence = shared.sequence;
    cute::SM90_TMA_STORE_5D::copy(
        &map, from, column, kRagged - sequence.held_k + tile.first_key + first_row(), tile.kv_head,
        kRagged, sequence.end_k - sequence.seqlen_k + sequence.held_k);
  }

  // Rounds 64 rows of a gradient and stores them through the shared memory of what it is the
  // gradient of.
  template <int columns, int slab, int swizzle_bits, int count>
  __device__ __forceinline__ void store(const CUtensorMap& map, Element* space,
                                        const float (&gradient)[count], float scale,
                                        const Tile& tile) {
    round_rows<columns, slab, swizzle_bits>(space, gradient, scale);
    barrier_sync(kStore + warpgroup, kWarpgroup);
    if (threadIdx.x % kWarpgroup == 0) {
#pragma unroll
      for (int column = 0; column < columns; column += slab) {
        copy_rows(map, space + (column / slab * kBlockN + first_row()) * slab, column, tile);
      }
      cute::tma_store_arrive();
    }
  }

  __device__ __forceinline__ void finish() {
    if (threadIdx.x % kWarpgroup == 0) {
      cute::tma_store_wait<0>();  // shared memory must outlive the copies from it
    }
  }

  __device__ __forceinline__ void store_dv(const Tile& tile, const ValueGradient& dv) {
    store<kHeadDimVPadded, kVSlab, kVSwizzleBits>(params.dv, shared.v, dv, 1.f, tile);
  }

  __device__ __forceinline__ void store_dk(const Tile& tile, const KeyGradient& dk) {
    store<kHeadDimPadded, kQkSlab, kQkSwizzleBits>(params.dk, shared.k, dk, params.scale, tile);
  }

  // Both gradients of a tile, where all have read K and V.
  __device__ __forceinline__ void leave(const Tile& tile, const KeyGradient& dk,
                                        const ValueGradient& dv) {
    if (shared.sequence.kept >= 0) {
      keep(share_of(tile).dv, dv);
      keep(share_of(tile).dk, dk);
      return;
    }
    store_dv(tile, dv);
    store_dk(tile, dk);
    finish();
  }

  // Hands numbers of a part of dQ to the thread that adds them up, once there is room; the first
  // finds it.
  template <int count>
  __device__ __forceinline__ void hand_on(float4* to, const float* numbers, int part,
                                          uint32_t phase, int adder) {
    shared.dq_empty[part].wait(phase);
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      to[i / 4 * kWarpgroup] = {numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]};
    }
    cutlass::arch::fence_view_async_shared();
    arrive(shared.dq_full[adder][part]);
  }

  template <int count>
  __device__ __forceinline__ void pass_dq_on(const float (&dq)[count], int part) {
    float4* to = reinterpret_cast<float4*>(shared.dq) +
                 part * kWarpgroup * kDqColumns / 8 / kDqSlices + threadIdx.x % kWarpgroup;
    hand_on<count>(to, dq, part, adder() ^ 1, adder());
  }

  // Issues S and dP of the next Q and dO.
  __device__ __forceinline__ void issue_scores_and_dp(Scores& s, Scores& dp) {
    shared.q_full[q.stage].wait(q.phase);
    issue_statistics(s, dp);
    issue_scores(s, q.stage);
    shared.dout_full[dout().stage].wait(dout().phase);
    wgmma_fence();  // the wait may have been a loop
    issue_dp(dp);
  }

  // The rest of a step, while dV is on its way: dK, and this warpgroup's part of dQ.
  __device__ __forceinline__ void multiply_ds(KeyGradient& dk, ValueGradient& dv, QueryGradient& dq,
                                              Packed& d_scores) {
    issue_own_dq(dq);
    wgmma_wait<1>();
    fence_operand(dv);
    arrive(shared.dout_empty[dout().stage]);
    issue_dk(dk, d_scores);
    wgmma_wait<1>();
    fence_operand(dq);
    pass_dq_on(dq, warpgroup);
    wgmma_wait<0>();
    fence_operand(dk);
    arrive(shared.q_empty[q.stage]);
  }

  // Issues this warpgroup's part of dQ, once all have stored their dS.
  __device__ __forceinline__ void issue_own_dq(QueryGradient& dq) {
    barrier_sync(kAllConsumers, kConsumers * kWarpgroup);
    issue_dq(dq, shared.ds[ds().stage] + warpgroup * kDqRowStep * kBlockN,
             shared.k + warpgroup * kDqColumnStep * kBlockN);
  }

  // One block of rows.
  template <bool masked>
  __device__ __forceinline__ void step(const Tile& tile, int block, KeyGradient& dk,
                                       ValueGradient& dv) {
    Scores s, dp;
    issue_scores_and_dp(s, dp);
    wgmma_wait<1>();
    fence_operand(s);
    exponentiate<masked>(tile, block, s);
    wgmma_wait<0>();
    fence_operand(dp);
    differentiate(s, dp);
    Packed p, d_scores;
    pack_scores(p, s);
    pack_scores(d_scores, dp);
    store_ds(d_scores);
    issue_dv(dv, p);
    cutlass::arch::fence_view_async_shared();
    QueryGradient dq;
    multiply_ds(dk, dv, dq, d_scores);
    advance();
  }

  // dQ of others' dS alone.
  __device__ __forceinline__ void multiply_others_ds() {
    QueryGradient dq;
    issue_own_dq(dq);
    wgmma_wait<0>();
    fence_operand(dq);
    pass_dq_on(dq, warpgroup);
  }

  // Whether no row of a block sees any of its 64 keys.
  __device__ __forceinline__ bool sees_none(const Tile& tile, int block) const {
    return seen_by(lengths_of(params, shared), (block + 1) * kBlockM - 1).last <=
           tile.first_key + first_row();
  }

  // A block of which that is so: others' dS, and nothing of its own.
  __device__ __forceinline__ void pass() {
    shared.q_full[q.stage].wait(q.phase);  // what is not there yet cannot be given back
    shared.dout_full[dout().stage].wait(dout().phase);
    arrive(shared.dout_empty[dout().stage]);
    const Packed nothing = {};
    store_ds(nothing);
    cutlass::arch::fence_view_async_shared();
    multiply_others_ds();
    arrive(shared.q_empty[q.stage]);
    advance();
  }

  // All blocks of rows of a tile, from the last to the first, each for all its query heads. Tiles
  // of a head have more blocks or fewer: head by head one with fewer would wait for the one that
  // adds to dQ first. One loop for both, so that ptxas keeps nothing of a block in registers from
  // head to head.
  template <class... Registers>
  __device__ __forceinline__ void take_steps(const Tile& tile, Registers&... registers) {
    const int heads = tile.last_head - tile.first_head;
    int block = tile.last - 1, left = heads;  // of the block
    const auto go_on = [&] {
      if (--left == 0) {
        left = heads;
        --block;
      }
    };
    for (; block >= max(tile.full_first, tile.first); go_on()) {
      step<false>(tile, block, registers...);
    }
    for (; block >= tile.first; go_on()) {
      if (sees_none(tile, block)) {
        pass();
        continue;
      }
      step<true>(tile, block, registers...);
    }
  }

  __device__ __forceinline__ void run(const Tile& tile) {
    KeyGradient dk = {};
    ValueGradient dv = {};
    shared.k_full.wait(0);
    shared.v_full.wait(0);
    take_steps(tile, dk, dv);
    barrier_sync(kAllConsumers, kConsumers * kWarpgroup);  // K has been read, and V
    leave(tile, dk, dv);
  }
};

// ---- The kernel ------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads, 1)
    attention_backward(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) char shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);

  wait_for_launch_before();
  const TileList list = *params.list;
  if (int(blockIdx.x) / kCluster >= list.tiles * params.kv_heads) {
    return;
  }
  Sequence sequence;
  const Tile found = tile_of(params, list, sequence);
  if (threadIdx.x == 0) {
    shared.sequence = sequence;
  }
  const Tile& tile = found;
  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(&params.q);
    cute::prefetch_tma_descriptor(&params.k);
    cute::prefetch_tma_descriptor(&params.v);
    cute::prefetch_tma_descriptor(&params.dout);
    cute::prefetch_tma_descriptor(&params.dk);
    cute::prefetch_tma_descriptor(&params.dv);
    shared.k_full.init(1);
    shared.v_full.init(1);
    for (int stage = 0; stage < kStages; ++stage) {
      shared.q_full[stage].init(1);
      shared.q_empty[stage].init(kCluster * kConsumers * kWarpgroup / 32);
    }
    for (int stage = 0; stage < kDoStages; ++stage) {
      shared.dout_full[stage].init(1);
      shared.dout_empty[stage].init(kCluster * kConsumers * kWarpgroup / 32);
    }
    for (int part = 0; part < kDqParts; ++part) {
      for (int adder = 0; adder < kDqAdders; ++adder) {
        shared.dq_full[adder][part].init(kWarpgroup / 32);
      }
      shared.dq_empty[part].init(1);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();

  const int warpgroup =
      __shfl_sync(0xffffffff, threadIdx.x / kWarpgroup, 0);  // known to be uniform
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    if (threadIdx.x == 0) {
      Loader{params, shared}.run(tile);
    } else if (threadIdx.x % 32 == 0 && threadIdx.x <= 32 * kDqAdders) {
      add_dq(params, shared, tile, threadIdx.x / 32 - 1);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    Consumer{params, shared, warpgroup - 1}.run(tile);
  }
}

}  // namespace fagen_bwd_fp16_d128_causal_m64n128_varlen_kernel

// ---- The C interface -------------------------------------------------------------------------

#ifndef FAGEN_BACKWARD_VARLEN_ARGS
#define FAGEN_BACKWARD_VARLEN_ARGS 1

extern "C" {

// One varlen call of a kernel of kind backward: the same struct for all of them. Strides are in
// elements; a dimension without one is contiguous.
struct FagenBackwardVarlenArgs {
  uint32_t struct_bytes;  // sizeof(FagenBackwardVarlenArgs)
  uint32_t version;       // 1: callers built for another are recognised
  void* workspace;  // from a multiple of 16 bytes on as large as fagen_<slug>_workspace says; null
                    // where that is nothing
  int64_t workspace_bytes;   // how large it is
  const void* dout;          // fp16 (total_q, heads, 128): the gradient of out
  const void* q;             // fp16 (total_q, heads, 128)
  const void* k;             // fp16 (total_k, kv_heads, 128)
  const void* v;             // fp16 (total_k, kv_heads, 128)
  const void* cu_seqlens_q;  // int32 (offsets): the row of q at which each sequence begins, and the
                             // end of the last; offsets = batch + 1; offsets = batch + 1
  const void* cu_seqlens_k;  // int32 (offsets): the row of k and v at which each sequence begins,
                             // and the end of the last; offsets = batch + 1
  const void* seqused_k;  // int32 (offsets - 1): how many of its keys each sequence sees, the first
                          // ones; null: all. Gradients of the others are 0
  const void* out;        // fp16 (total_q, heads, 128): the forward pass's
  const void* lse;   // fp32 (heads, total_q): the forward pass's log-sum-exp, natural logarithm;
                     // minus infinity in a row that sees no key
  const void* dlse;  // fp32 (heads, total_q): the gradient of lse; null: 0
  void* dq;          // fp16 (total_q, heads, 128): the gradient of q; zeros in a row of no sequence
  void* dk;  // fp16 (total_k, kv_heads, 128): the gradient of k; zeros in a row of no sequence
  void* dv;  // fp16 (total_k, kv_heads, 128): the gradient of v; zeros in a row of no sequence
  int64_t dout_stride_head, dout_stride_seq;
  int64_t q_stride_head, q_stride_seq;
  int64_t k_stride_head, k_stride_seq;
  int64_t v_stride_head, v_stride_seq;
  int64_t out_stride_head, out_stride_seq;
  int64_t lse_stride_head;
  int64_t dlse_stride_head;
  int64_t dq_stride_head, dq_stride_seq;
  int64_t dk_stride_head, dk_stride_seq;
  int64_t dv_stride_head, dv_stride_seq;
  int32_t total_q, total_k, heads, kv_heads, offsets;
  float scale;  // of q kᵀ before the softmax; finite and positive, 1e+08 at most
};

}  // extern "C"

#elif FAGEN_BACKWARD_VARLEN_ARGS != 1
#error "kernels of kind backward of two versions of fagen in one translation unit"
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
int fagen_bwd_fp16_d128_causal_m64n128_varlen(const struct FagenBackwardVarlenArgs* args,
                                              void* stream);
// How many bytes of workspace a call of these sizes needs; -1 where args is null, or a call of such
// sizes is refused.
int64_t fagen_bwd_fp16_d128_causal_m64n128_varlen_workspace(
    const struct FagenBackwardVarlenArgs* args);
const char* fagen_bwd_fp16_d128_causal_m64n128_varlen_message(int status);
const struct FagenKernelInfo* fagen_bwd_fp16_d128_causal_m64n128_varlen_info(void);

}  // extern "C"

// ---- The host's side -------------------------------------------------------------------------

#include "fagen_host.h"
#if FAGEN_HOST_H != 0xa95921b9
#error "the fagen_host.h beside this kernel is that of another version of fagen"
#endif

namespace fagen_bwd_fp16_d128_causal_m64n128_varlen_host {

using namespace fagen_bwd_fp16_d128_causal_m64n128_varlen_kernel;
using namespace fagen_host;
using fagen_host::ceil_div;  // of 64 bits: not what a kernel calls so

// How many tiles of a KV head there are at most, of keys in all sequences and around them.
int key_slots(const FagenBackwardVarlenArgs& a) {
  return a.total_k ? int(ceil_div(a.total_k, kCluster * kBlockN)) + a.offsets : 0;
}

// How many parts of dK and dV of a KV head there is room for, where groups are shared out: only of
// few tiles are some too long.
int most_kept(const FagenBackwardVarlenArgs& a) {
  const int64_t tiles = int64_t(key_slots(a)) * a.kv_heads;
  return a.heads > a.kv_heads && a.total_q && tiles <= 4 * kMachines
             ? std::min(4 * key_slots(a), 4 * kMachines / a.kv_heads)
             : 0;
}

// What all that takes of the workspace, and the list of tiles.
int64_t shares_bytes(const FagenBackwardVarlenArgs& a) {
  const int64_t kept = int64_t(most_kept(a)) * a.kv_heads * kCluster * sizeof(KeyBlock);
  return kept + sizeof(TileList) + int64_t(key_slots(a) + most_kept(a)) * sizeof(ListedTile);
}

// What calls end with, by Status.
constexpr const char* kMessages[] = {
    "launched",
    "struct_bytes or version is that of another FagenBackwardVarlenArgs",
    "a size is negative or too large",
    "heads must be a multiple of kv_heads",
    "there are 2^30 tiles or blocks of rows or more",
    "scale must be finite and positive, scale 1e+08 at most",
    "a tensor is given that cannot be",
    "a tensor that is needed is null",
    "a tensor does not begin at a multiple of 16 bytes (cu_seqlens_q: 4, cu_seqlens_k: 4, seqused_k: 4, lse: 4, dlse: 4)",
    "a stride is negative, too large, or no multiple of 16 bytes",
    "elements of an output (dq, dk, dv) overlap: a stride is 0 or too small",
    "the workspace is null, too small, or does not begin at a multiple of 16 bytes",
    "the current device is not a Hopper GPU (compute capability 9.0)",
    "the CUDA driver is missing, or too old for tensor maps",
    "the CUDA driver refused to describe a tensor for TMA",
    "the kernel could not be launched",
};

// Whether sizes go together, and are not too large.
Status check_sizes(const FagenBackwardVarlenArgs& a) {
  for (const int size : {a.total_q, a.total_k, a.heads, a.kv_heads, a.offsets}) {
    if (size < 0 || size > 1073741824) {
      return kBadSize;
    }
  }
  if (a.kv_heads == 0 ? a.heads != 0 : a.heads % a.kv_heads != 0) {
    return kBadRatio;
  }
  if (double(ceil_div(a.total_k, 128) + a.offsets) * double(a.kv_heads) >= 1 << 30) {
    return kTooMany;
  }
  if (double(ceil_div(a.total_q, 64) + a.offsets) * double(a.heads) >= 1 << 30) {
    return kTooMany;
  }
  return kOk;
}

// Of a call whose sizes are checked, which has fewer than 2^30 of what each record is of.
int64_t workspace_bytes([[maybe_unused]] const FagenBackwardVarlenArgs& a) {
  return int64_t(ceil_div(a.total_q, 64) + a.offsets) * a.heads * 34944 + shares_bytes(a);
}

Status check(const FagenBackwardVarlenArgs& a) {
  if (a.struct_bytes != sizeof(a) || a.version != FAGEN_BACKWARD_VARLEN_ARGS) {
    return kWrongStruct;
  }
  if (const Status status = check_sizes(a)) {
    return status;
  }
  if (!(a.scale > 0) || !std::isfinite(a.scale) || a.scale > 100000000.0) {
    return kBadScalar;
  }
  for (const Status status : {
           check_tensor(a.dout, 2, true, false, 4294967296, 128,
                        {{a.total_q, a.dout_stride_seq}, {a.heads, a.dout_stride_head}}),
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
           check_tensor(a.out, 2, true, false, 4294967296, 128,
                        {{a.total_q, a.out_stride_seq}, {a.heads, a.out_stride_head}}),
           check_tensor(a.lse, 4, false, false, kMostStride, a.total_q,
                        {{a.heads, a.lse_stride_head}}),
           !a.dlse ? kOk
                   : check_tensor(a.dlse, 4, false, false, kMostStride, a.total_q,
                                  {{a.heads, a.dlse_stride_head}}),
           check_tensor(a.dq, 2, true, true, 4294967296, 128,
                        {{a.total_q, a.dq_stride_seq}, {a.heads, a.dq_stride_head}}),
           check_tensor(a.dk, 2, true, true, 4294967296, 128,
                        {{a.total_k, a.dk_stride_seq}, {a.kv_heads, a.dk_stride_head}}),
           check_tensor(a.dv, 2, true, true, 4294967296, 128,
                        {{a.total_k, a.dv_stride_seq}, {a.kv_heads, a.dv_stride_head}}),
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

Status launch(const FagenBackwardVarlenArgs& a, cudaStream_t stream) {
  if (a.heads == 0) {
    return kOk;
  }
  constexpr int shared_bytes = sizeof(SharedStorage);
  const int multiprocessors = prepare_device<attention_backward>(shared_bytes);
  if (multiprocessors == 0) {
    return kNotHopper;
  }
  if (!encode_tiled()) {
    return kNoDriver;
  }

  Params params;
  params.out_rows = {static_cast<const Element*>(a.out), a.out_stride_seq, a.out_stride_head};
  params.dout_rows = {static_cast<const Element*>(a.dout), a.dout_stride_seq, a.dout_stride_head};
  params.dq_rows = {static_cast<Element*>(a.dq), a.dq_stride_seq, a.dq_stride_head};
  params.dk_rows = {static_cast<Element*>(a.dk), a.dk_stride_seq, a.dk_stride_head};
  params.dv_rows = {static_cast<Element*>(a.dv), a.dv_stride_seq, a.dv_stride_head};
  params.lse = {static_cast<const float*>(a.lse), a.lse_stride_head};
  params.dlse = {static_cast<const float*>(a.dlse), a.dlse_stride_head};
  params.row_blocks = static_cast<RowBlock*>(a.workspace);
  params.cu_seqlens_q = static_cast<const int32_t*>(a.cu_seqlens_q);
  params.cu_seqlens_k = static_cast<const int32_t*>(a.cu_seqlens_k);
  params.seqused_k = static_cast<const int32_t*>(a.seqused_k);
  params.offsets = a.offsets;
  params.total_q = a.total_q;
  params.total_k = a.total_k;
  params.kv_heads = a.kv_heads;
  params.group = a.heads / a.kv_heads;
  params.scale = a.scale;

  // LSEs are divided by it, and of less than that nothing is left of S
  params.scale_log2 = std::max(a.scale, 0x1p-100f) * 1.44269504089f;

  // How many blocks there are the GPU finds out: there is a thread block for each that there may
  // be.
  const int m_slots = a.total_q ? int(ceil_div(a.total_q, kBlockM)) + a.offsets : 0;
  const int kept = most_kept(a);
  const int64_t tiles = int64_t(key_slots(a) + kept) * a.kv_heads;
  if (m_slots == 0 && tiles == 0) {
    return kOk;
  }
  params.m_slots = m_slots;
  params.most_tiles = key_slots(a) + kept;
  params.most_kept = kept;
  params.key_blocks = reinterpret_cast<KeyBlock*>(params.row_blocks + int64_t(a.heads) * m_slots);
  params.list =
      reinterpret_cast<TileList*>(params.key_blocks + int64_t(kept) * a.kv_heads * kCluster);
  params.listed = reinterpret_cast<ListedTile*>(params.list + 1);
  // Heads come in sections whose rows fit their share of the L2 cache.
  const int64_t head_bytes = int64_t(a.total_q) * params.group *
                             ((kHeadDim + kHeadDimV) * sizeof(Element) + kHeadDim * sizeof(float));
  params.section_heads = int(
      std::clamp<int64_t>(kL2Share / std::max<int64_t>(1, head_bytes), 1, std::max(1, a.kv_heads)));
  const int grid = int(tiles) * kCluster;

  const Tensor q{.data = a.total_q > 0 ? a.q : a.k,
                 .sizes = {kHeadDim, a.total_q, a.heads},
                 .strides = {a.q_stride_seq, a.q_stride_head},
                 .box = {kQkSlab, kBlockM, 1},
                 .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                 .type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
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
                 .type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                 .element_bytes = sizeof(Element),
                 .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe_varlen(&params.k, k, kRagged)) {
    return kTensorMapRefused;
  }

  const Tensor v{.data = a.total_k > 0 ? a.v : a.dout,
                 .sizes = {kHeadDimV, a.total_k, a.kv_heads},
                 .strides = {a.v_stride_seq, a.v_stride_head},
                 .box = {kVSlab, kBlockN, 1},
                 .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                 .type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                 .element_bytes = sizeof(Element),
                 .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe_varlen(&params.v, v, kRagged)) {
    return kTensorMapRefused;
  }

  const Tensor dout{.data = a.total_q > 0 ? a.dout : a.v,
                    .sizes = {kHeadDimV, a.total_q, a.heads},
                    .strides = {a.dout_stride_seq, a.dout_stride_head},
                    .box = {kVSlab, kBlockM, 1},
                    .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                    .type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                    .element_bytes = sizeof(Element),
                    .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe_varlen(&params.dout, dout, kRagged)) {
    return kTensorMapRefused;
  }

  const Tensor dk{.data = a.total_k > 0 ? a.dk : a.q,
                  .sizes = {kHeadDim, a.total_k, a.kv_heads},
                  .strides = {a.dk_stride_seq, a.dk_stride_head},
                  .box = {kQkSlab, kWarpgroupRows, 1},
                  .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                  .type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                  .element_bytes = sizeof(Element),
                  .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe_varlen(&params.dk, dk, kRagged)) {
    return kTensorMapRefused;
  }

  const Tensor dv{.data = a.total_k > 0 ? a.dv : a.dout,
                  .sizes = {kHeadDimV, a.total_k, a.kv_heads},
                  .strides = {a.dv_stride_seq, a.dv_stride_head},
                  .box = {kVSlab, kWarpgroupRows, 1},
                  .swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                  .type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                  .element_bytes = sizeof(Element),
                  .promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B};
  if (!describe_varlen(&params.dv, dv, kRagged)) {
    return kTensorMapRefused;
  }

  by_heads(params, a.heads, [&](int heads) {
    prepare_rows<<<dim3(m_slots + 1, heads), kRowThreads, 0, stream>>>(
        params);  // the first lists tiles
  });
  if (tiles > 0 && !enqueue(attention_backward, grid, kThreads, shared_bytes, stream, params)) {
    return kLaunchFailed;
  }
  if (m_slots > 0) {
    const int summed =
        params.most_kept > 0 ? params.most_tiles : 0;  // what a tile may have a part of
    by_heads(params, a.heads, [&](int heads) {
      round_dq<<<dim3(summed + m_slots, heads), kRowThreads, 0, stream>>>(params);
    });
  }
  return cudaGetLastError() == cudaSuccess ? kOk : kLaunchFailed;
}

}  // namespace fagen_bwd_fp16_d128_causal_m64n128_varlen_host

extern "C" int fagen_bwd_fp16_d128_causal_m64n128_varlen(const FagenBackwardVarlenArgs* args,
                                                         void* stream) {
  using namespace fagen_bwd_fp16_d128_causal_m64n128_varlen_host;
  const Status status = args ? check(*args) : kNullPointer;
  return status ? status : launch(*args, static_cast<cudaStream_t>(stream));
}

extern "C" int64_t fagen_bwd_fp16_d128_causal_m64n128_varlen_workspace(
    const FagenBackwardVarlenArgs* args) {
  using namespace fagen_bwd_fp16_d128_causal_m64n128_varlen_host;
  return args && !check_sizes(*args) ? workspace_bytes(*args) : -1;
}

extern "C" const char* fagen_bwd_fp16_d128_causal_m64n128_varlen_message(int status) {
  using namespace fagen_bwd_fp16_d128_causal_m64n128_varlen_host;
  constexpr int kNoKernel = 100;  // of who chooses among kernels
  return status >= 0 && status <= kLaunchFailed ? kMessages[status]
         : status == kNoKernel                  ? "no kernel computes that"
                                                : "unknown status";
}

extern "C" const FagenKernelInfo* fagen_bwd_fp16_d128_causal_m64n128_varlen_info(void) {
  using namespace fagen_bwd_fp16_d128_causal_m64n128_varlen_kernel;
  static const FagenKernelInfo info = {
      sizeof(FagenKernelInfo),
      kSharedBytes,
      kThreads,
      kLaunchRegisters,
      "bwd_fp16_d128_causal_m64n128_varlen",
      "4a27ef59ca8d5400a6403825343106790f704eff6371862edfcbd7f6f0fe6123"};
  return &info;
}
// sha256 of what is above: a1ae83970f8525430e1fe1d5983b03498d18bc2965d8eb5cbc61385295cec01b
