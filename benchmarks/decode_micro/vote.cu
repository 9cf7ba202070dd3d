// Clocks until the four warps of a warpgroup agree on a bit: a barrier that votes, and a barrier
// with votes of each warp through shared memory.

#include "micro.cuh"

enum class How { kBarrier, kAnd, kPopulation, kShared, kWarp };

constexpr int kThreads = 128, kLoops = 1024;

__device__ __forceinline__ void barrier() {
  asm volatile("barrier.cta.sync.aligned 1, 128;" ::: "memory");
}

__device__ __forceinline__ bool barrier_and(bool mine) {
  uint32_t all;
  asm volatile(
      "{\n"
      "  .reg .pred p, q;\n"
      "  setp.ne.u32 p, %1, 0;\n"
      "  barrier.cta.red.and.aligned.pred q, 1, 128, p;\n"
      "  selp.b32 %0, 1, 0, q;\n"
      "}"
      : "=r"(all)
      : "r"(uint32_t(mine))
      : "memory");
  return all;
}

__device__ __forceinline__ uint32_t barrier_population(bool mine) {
  uint32_t count;
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  setp.ne.u32 p, %1, 0;\n"
      "  barrier.cta.red.popc.aligned.u32 %0, 1, 128, p;\n"
      "}"
      : "=r"(count)
      : "r"(uint32_t(mine))
      : "memory");
  return count;
}

template <How kHow>
__global__ void __launch_bounds__(kThreads) vote(uint32_t seed, long long* taken, uint32_t* sink) {
  __shared__ uint4 votes[2];  // of each warp; two sets, so that one barrier a vote is enough
  uint32_t agreed = 0;
  __syncthreads();
  const long long began = clock64();
  for (int loop = 0; loop < kLoops; ++loop) {
    const bool mine =
        (agreed + loop) * seed + threadIdx.x < 0x80000000;  // waits for the vote before
    if constexpr (kHow == How::kBarrier) {
      barrier();
      agreed += mine;
    } else if constexpr (kHow == How::kAnd) {
      agreed += barrier_and(mine);
    } else if constexpr (kHow == How::kPopulation) {
      agreed += barrier_population(mine) == kThreads;
    } else if constexpr (kHow == How::kWarp) {
      agreed += __all_sync(~0u, mine);
    } else {
      const bool warp = __all_sync(~0u, mine);
      if (threadIdx.x % 32 == 0) {
        reinterpret_cast<volatile uint32_t*>(&votes[loop % 2])[threadIdx.x / 32] = warp;
      }
      barrier();
      const uint4 all = votes[loop % 2];
      agreed += all.x & all.y & all.z & all.w;
    }
  }
  const long long ended = clock64();
  if (threadIdx.x == 0) {
    taken[blockIdx.x] = ended - began;
  }
  sink[blockIdx.x * kThreads + threadIdx.x] = agreed;
}

template <How kHow>
void row(Rows& rows, const char* what, long long* taken, uint32_t* sink) {
  rows.row(what, "clocks", [&] {
    const int sms = sm_count();
    for (int round = 0; round < 3; ++round) {
      vote<kHow><<<sms, kThreads, 0, stream()>>>(
          0, taken, sink);  // all agree, which the compiler cannot know
      ok(cudaGetLastError(), "a launch");
    }
    ok(cudaStreamSynchronize(stream()), "a kernel");
    for (const uint32_t agreed : fetched(sink, sms * kThreads)) {
      if (agreed != kLoops) {
        throw Failure("wrong: " + std::to_string(agreed) + " votes passed of " +
                      std::to_string(kLoops));
      }
    }
    const std::vector<long long> all = fetched(taken, sms);
    return median({all.begin(), all.end()}) / kLoops;
  });
}

int main(int argc, char** argv) {
  return measured(argc, argv, [](Rows& rows) {
    auto* taken = allocated<long long>(256);
    auto* sink = allocated<uint32_t>(256 * kThreads);
    ok(cudaDeviceSynchronize(), "clearing");
    row<How::kBarrier>(rows, "barrier of a warpgroup", taken, sink);
    row<How::kAnd>(rows, "barrier.red.and", taken, sink);
    row<How::kPopulation>(rows, "barrier.red.popc", taken, sink);
    row<How::kShared>(rows, "vote of each warp, shared memory, barrier", taken, sink);
    row<How::kWarp>(rows, "vote of a warp alone", taken, sink);
  });
}
