// What it costs to combine the partial outputs of split keys, in four ways: a second launch, one
// that overlaps by programmatic dependent launch (PDL), the thread block that arrives last, and a
// cluster's shared memory.
//
// 128 thread blocks spin for some microseconds, as if they read keys; then each has a partial
// output of four rows by 128 columns in fp32, 2 KB, and four log-sum-exps. Said is how much longer
// a kernel with its combining takes than the same kernel that ends with its partials written; every
// result is compared with the CPU's.

#include <cmath>

#include "micro.cuh"

constexpr int kBlocks = 128, kRows = 4, kColumns = 128;
constexpr int kPartial = kRows * kColumns;
constexpr long long kSpin =
    6'000;  // clocks: more than a launch takes, less than the attention of a long cache

enum class Way { kNone, kLaunch, kOverlapEarly, kOverlapLate, kTicket, kClusterAlone, kCluster };

struct Memory {
  float *partials, *lse,
      *out;           // (head, split, row, column), (head, split, row), (head, row, column)
  uint32_t* tickets;  // of a head; zero before and after every launch
};

__host__ __device__ inline float partial_value(int head, int split, int element) {
  return float((head * 7 + split * 13 + element * 3) % 64) / 64 - 0.5f;
}

__host__ __device__ inline float partial_lse(int head, int split, int row) {
  return float((head + split * 5 + row * 3) % 11) * 0.25f;
}

// A sum over splits weighted by their log-sum-exps; L(s) and V(s) give those of a split, and its
// value.
template <int kSplits, class L, class V>
__device__ __forceinline__ float combined(L lse, V value) {
  float most = -INFINITY, lses[kSplits], values[kSplits];
#pragma unroll
  for (int s = 0; s < kSplits; ++s) {
    lses[s] = lse(s);
    values[s] = value(s);
    most = fmaxf(most, lses[s]);
  }
  float sum = 0, weights = 0;
#pragma unroll
  for (int s = 0; s < kSplits; ++s) {
    const float weight = __expf(lses[s] - most);
    weights += weight;
    sum += weight * values[s];
  }
  return sum / weights;
}

template <int kSplits>
__device__ __forceinline__ float combined_in_memory(const Memory& memory, int head, int element) {
  const int first = head * kSplits;
  // past L1, where another block's partials may be old ones
  return combined<kSplits>(
      [&](int s) { return __ldcg(&memory.lse[(first + s) * kRows + element / kColumns]); },
      [&](int s) { return __ldcg(&memory.partials[(first + s) * kPartial + element]); });
}

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

__device__ __forceinline__ float of_rank(const float* mine, int rank) {
  float found;
  asm volatile(
      "{\n"
      "  .reg .b32 remote;\n"
      "  mapa.shared::cluster.u32 remote, %1, %2;\n"
      "  ld.shared::cluster.f32 %0, [remote];\n"
      "}"
      : "=f"(found)
      : "r"(smem_address(mine)), "r"(rank)
      : "memory");
  return found;
}

template <Way kWay, int kSplits>
__global__ void __launch_bounds__(kColumns) attend(Memory memory) {
  __shared__ float partial[kPartial], lse[kRows];
  __shared__ bool last;
  const int head = blockIdx.x / kSplits, split = blockIdx.x % kSplits, column = threadIdx.x;
  if constexpr (kWay == Way::kOverlapEarly) {
    launch_dependents();
  }
  const long long began = clock64();
  while (clock64() - began < kSpin) {
  }
  if constexpr (kWay == Way::kOverlapLate) {
    launch_dependents();
  }
  if constexpr (kWay == Way::kCluster) {
    for (int row = 0; row < kRows; ++row) {
      partial[row * kColumns + column] = partial_value(head, split, row * kColumns + column);
    }
    if (column < kRows) {
      lse[column] = partial_lse(head, split, column);
    }
    cluster_barrier();
    constexpr int kShare = kPartial / kSplits;  // elements that this block combines
    if (column < kShare) {
      const int element = split * kShare + column;
      memory.out[head * kPartial + element] =
          combined<kSplits>([&](int s) { return of_rank(&lse[element / kColumns], s); },
                            [&](int s) { return of_rank(&partial[element], s); });
    }
    cluster_barrier();  // nobody's shared memory goes while others read it
  } else {
    for (int row = 0; row < kRows; ++row) {
      const int element = row * kColumns + column;
      memory.partials[blockIdx.x * kPartial + element] = partial_value(head, split, element);
    }
    if (column < kRows) {
      memory.lse[blockIdx.x * kRows + column] = partial_lse(head, split, column);
    }
  }
  if constexpr (kWay == Way::kTicket) {
    __threadfence();
    __syncthreads();
    if (column == 0) {
      last =
          atomicInc(&memory.tickets[head], kSplits - 1) == kSplits - 1;  // wraps to zero by itself
      __threadfence();
    }
    __syncthreads();
    if (last) {
      for (int row = 0; row < kRows; ++row) {
        const int element = row * kColumns + column;
        memory.out[head * kPartial + element] = combined_in_memory<kSplits>(memory, head, element);
      }
    }
  }
}

// A block to each row of a head.
template <bool kOverlapping, int kSplits>
__global__ void __launch_bounds__(kColumns) combine(Memory memory) {
  if constexpr (kOverlapping) {
    wait_for_primary();
  }
  const int head = blockIdx.x / kRows, element = blockIdx.x % kRows * kColumns + threadIdx.x;
  memory.out[head * kPartial + element] = combined_in_memory<kSplits>(memory, head, element);
}

void compare(const Memory& memory, int splits) {
  const std::vector<float> out = fetched(memory.out, kBlocks / splits * kPartial);
  for (size_t i = 0; i < out.size(); ++i) {
    const int head = int(i) / kPartial, element = int(i) % kPartial;
    double sum = 0, weights = 0;
    for (int split = 0; split < splits; ++split) {
      const double weight = std::exp(double(partial_lse(head, split, element / kColumns)));
      weights += weight;
      sum += weight * partial_value(head, split, element);
    }
    if (!(std::abs(out[i] - sum / weights) < 1e-4)) {
      throw Failure("wrong: element " + std::to_string(i) + " is " + std::to_string(out[i]) +
                    " instead of " + std::to_string(sum / weights));
    }
  }
}

template <Way kWay, int kSplits>
double step_us(const Memory& memory) {
  constexpr int kSteps = 50;
  constexpr bool kOverlapping = kWay == Way::kOverlapEarly || kWay == Way::kOverlapLate;
  constexpr bool kInCluster = kWay == Way::kCluster || kWay == Way::kClusterAlone;
  const Launch first = {kBlocks, kColumns, 0, kInCluster ? kSplits : 1};
  const Launch second = {kBlocks / kSplits * kRows, kColumns, 0, 1, kOverlapping};
  prepare(attend<kWay, kSplits>, first);
  prepare(combine<kOverlapping, kSplits>, second);  // loaded before a graph is captured
  ok(cudaMemsetAsync(memory.out, 0xFF, kBlocks * kPartial * sizeof(float), stream()), "cudaMemset");
  const double us = graph_us([&] {
    for (int step = 0; step < kSteps; ++step) {
      launch(attend<kWay, kSplits>, first, memory);
      if (kOverlapping || kWay == Way::kLaunch) {
        launch(combine<kOverlapping, kSplits>, second, memory);
      }
    }
  });
  if (kWay != Way::kNone && kWay != Way::kClusterAlone) {
    compare(memory, kSplits);
  }
  return us / kSteps;
}

template <Way kWay, int kSplits>
void beyond(Rows& rows, const Memory& memory, const char* name) {
  const std::string what = std::string(name) + ", " + std::to_string(kSplits) + " splits";
  rows.row(what, "us",
           [&] { return step_us<kWay, kSplits>(memory) - step_us<Way::kNone, kSplits>(memory); });
}

template <int kSplits>
void all(Rows& rows, const Memory& memory) {
  rows.row("the kernel without combining, " + std::to_string(kSplits) + " splits", "us",
           [&] { return step_us<Way::kNone, kSplits>(memory); });
  beyond<Way::kLaunch, kSplits>(rows, memory, "second launch");
  beyond<Way::kOverlapEarly, kSplits>(rows, memory, "second launch with PDL, triggered first");
  beyond<Way::kOverlapLate, kSplits>(rows, memory,
                                     "second launch with PDL, triggered before the epilogue");
  beyond<Way::kTicket, kSplits>(rows, memory, "the last to arrive, by a ticket");
  beyond<Way::kClusterAlone, kSplits>(rows, memory, "in clusters, nothing combined");
  beyond<Way::kCluster, kSplits>(rows, memory, "in clusters, through shared memory");
}

int main(int argc, char** argv) {
  return measured(argc, argv, [](Rows& rows) {
    const Memory memory = {allocated<float>(kBlocks * kPartial), allocated<float>(kBlocks * kRows),
                           allocated<float>(kBlocks * kPartial), allocated<uint32_t>(kBlocks)};
    ok(cudaDeviceSynchronize(),
       "clearing");  // the stream of the measurements does not wait for the default one
    all<8>(rows, memory);
    all<16>(rows, memory);
  });
}
