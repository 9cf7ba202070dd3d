// Clocks of wgmma m64nNk16 in fp16 for narrow N: A from shared memory, transposed in it, or from
// registers, by one to three warpgroups of a multiprocessor; and of a block's eight instructions
// with the wait behind them.

#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "micro.cuh"

namespace gmma = cute::SM90::GMMA;
using gmma::Major;

enum class From { kShared, kTransposed, kRegisters };

template <int kN, From kFrom>
struct Atom;
#define ATOM(n)                                                                                   \
  template <>                                                                                     \
  struct Atom<n, From::kShared> : gmma::MMA_64x##n##x16_F32F16F16_SS<Major::K, Major::K> {};      \
  template <>                                                                                     \
  struct Atom<n, From::kTransposed> : gmma::MMA_64x##n##x16_F32F16F16_SS<Major::MN, Major::K> {}; \
  template <>                                                                                     \
  struct Atom<n, From::kRegisters> : gmma::MMA_64x##n##x16_F32F16F16_RS<Major::K, Major::K> {}
ATOM(8);
ATOM(16);
ATOM(32);
ATOM(64);
#undef ATOM

// Tiles with a 128-byte swizzle: 64 columns of 2 bytes to a row, eight rows to an atom of 1,024
// bytes.
__device__ __forceinline__ uint64_t descriptor(const unsigned char* tile) {
  constexpr uint64_t kSwizzle128 = 1, kStride = 1024;
  return kSwizzle128 << 62 | (kStride >> 4) << 32 | uint64_t(1) << 16 |
         (smem_address(tile) & 0x3FFFF) >> 4;
}

template <int kN, From kFrom, size_t... i>
__device__ __forceinline__ void multiply(const uint32_t (&a)[4], uint64_t a_tile, uint64_t b_tile,
                                         float (&d)[kN / 2], std::index_sequence<i...>) {
  if constexpr (kFrom == From::kRegisters) {
    Atom<kN, kFrom>::fma(a[0], a[1], a[2], a[3], b_tile, d[i]..., gmma::ScaleOut::One);
  } else {
    Atom<kN, kFrom>::fma(a_tile, b_tile, d[i]..., gmma::ScaleOut::One);
  }
}

struct Span {
  long long began, ended;
};

constexpr int kDepth = 128;                 // of a product: eight instructions, two slabs of 64
constexpr int kTileA = 64 * kDepth * 2;     // bytes, of each warpgroup
constexpr int kInstructions = kDepth / 16;  // of a block of keys
constexpr int kLoops = 256;

// kBlocksAtOnce products are committed together; at most one such group is in flight behind
// another, none if kWaited.
template <int kN, From kFrom, bool kWaited>
__global__ void __launch_bounds__(384, 1) rate(Span* spans, float* sink) {
  constexpr int kBlocksAtOnce = kWaited ? 1 : 4;
  unsigned char* smem = aligned_smem();
  const int warpgroups = blockDim.x / 128;
  const int warpgroup = __shfl_sync(~0u, int(threadIdx.x / 128), 0);  // uniform, as descriptors are
  unsigned char* b = smem + warpgroups * kTileA;
  for (int i = threadIdx.x; i < (warpgroups * kTileA + kN * kDepth * 2) / 4; i += blockDim.x) {
    reinterpret_cast<uint32_t*>(smem)[i] =
        0x11001200 + (i * 2654435761u & 0x00FF00FF);  // small positive halves
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  uint32_t a[kInstructions][4];  // as a block's P would be, or keys that have been converted
  for (int i = 0; i < kInstructions * 4; ++i) {
    a[i / 4][i % 4] = reinterpret_cast<uint32_t*>(smem)[i * 128 + threadIdx.x % 128];
    asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
  }
  const uint64_t a_tile = descriptor(smem + warpgroup * kTileA), b_tile = descriptor(b);
  float d[kN / 2] = {};
  __syncthreads();
  const long long began = clock64();
  for (int loop = 0; loop < kLoops; ++loop) {
    cute::warpgroup_arrive();
#pragma unroll
    for (int block = 0; block < kBlocksAtOnce; ++block) {
#pragma unroll
      for (int k = 0; k < kInstructions; ++k) {
        // along columns 16 of them and then the next slab; along rows 16 of 128 bytes each
        const int a_offset = kFrom == From::kTransposed ? k * 2048 : k / 4 * 8192 + k % 4 * 32;
        const int b_offset = k / 4 * kN * 128 + k % 4 * 32;
        multiply<kN, kFrom>(a[k], a_tile + (a_offset >> 4), b_tile + (b_offset >> 4), d,
                            std::make_index_sequence<kN / 2>());
      }
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<kWaited ? 0 : 1>();
  }
  cute::warpgroup_wait<0>();
  const long long ended = clock64();
  float sum = 0;
  for (int i = 0; i < kN / 2; ++i) {
    cute::warpgroup_fence_operand(d[i]);
    sum += d[i];
  }
  if (threadIdx.x % 128 == 0) {
    spans[blockIdx.x * warpgroups + warpgroup] = {began, ended};
  }
  sink[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// The median over multiprocessors of the clocks from the first warpgroup's start to the last one's
// end.
double clocks(const std::vector<Span>& spans, int of_each) {
  std::vector<double> found;
  for (size_t first = 0; first < spans.size(); first += of_each) {
    Span all = spans[first];
    for (int i = 1; i < of_each; ++i) {
      all.began = std::min(all.began, spans[first + i].began);
      all.ended = std::max(all.ended, spans[first + i].ended);
    }
    found.push_back(double(all.ended - all.began));
  }
  return median(found);
}

template <int kN, From kFrom, bool kWaited>
double clocks(int warpgroups, Span* spans, float* sink) {
  const int sms = sm_count();
  const Launch how = {sms, 128 * warpgroups, warpgroups * kTileA + kN * kDepth * 2 + kKB};
  prepare(rate<kN, kFrom, kWaited>, how);
  for (int round = 0; round < 3; ++round) {
    launch(rate<kN, kFrom, kWaited>, how, spans, sink);
    ok(cudaStreamSynchronize(stream()), "a kernel");
  }
  return clocks(fetched(spans, sms * warpgroups), warpgroups) / kLoops;
}

template <int kN, From kFrom>
void instruction(Rows& rows, const char* from, Span* spans, float* sink) {
  const std::string what = "m64n" + std::to_string(kN) + "k16, A " + from + ", ";
  for (int warpgroups = 1; warpgroups <= 3; ++warpgroups) {
    rows.row(what + std::to_string(warpgroups) + " warpgroup(s)", "clocks an instruction", [&] {
      return clocks<kN, kFrom, false>(warpgroups, spans, sink) / (4 * kInstructions * warpgroups);
    });
  }
  rows.row(what + "eight and their wait, 1 warpgroup", "clocks",
           [&] { return clocks<kN, kFrom, true>(1, spans, sink); });
}

template <int kN>
void width(Rows& rows, Span* spans, float* sink) {
  instruction<kN, From::kShared>(rows, "from shared memory", spans, sink);
  instruction<kN, From::kTransposed>(rows, "transposed in shared memory", spans, sink);
  instruction<kN, From::kRegisters>(rows, "from registers", spans, sink);
}

int main(int argc, char** argv) {
  return measured(argc, argv, [](Rows& rows) {
    auto* spans = allocated<Span>(3 * 256);
    auto* sink = allocated<float>(384 * 256);
    ok(cudaDeviceSynchronize(), "clearing");
    width<8>(rows, spans, sink);
    width<16>(rows, spans, sink);
    width<32>(rows, spans, sink);
    width<64>(rows, spans, sink);
  });
}
