// How fast e4m3 becomes fp16: values per clock of a multiprocessor, of each step by itself and of
// all in one loop.
//
// The last loop is what a swapped product does with V: 16 bytes from each of two keys' rows out of
// shared memory, bytes of the two keys made pairs by PRMT, pairs converted.

#include <cuda_fp16.h>

#include "micro.cuh"

enum class Step { kConvert, kBits, kPermute, kLoad, kAll, kAllBits };

constexpr int kLoops = 512, kChains = 8;
constexpr int kTile = 32 * kKB;

// Two e4m3 values in the low half of a word → two fp16 values.
__device__ __forceinline__ uint32_t convert(uint32_t low_half) {
  uint32_t halves;
  asm("{\n"
      "  .reg .b16 pair, rest;\n"
      "  mov.b32 {pair, rest}, %1;\n"
      "  cvt.rn.f16x2.e4m3x2 %0, pair;\n"
      "}"
      : "=r"(halves)
      : "r"(low_half));
  return halves;
}

// The same for bytes 1 and 3, by bits: exponent and fraction moved into place, and the bias put
// right by a product. NaN becomes 480.
__device__ __forceinline__ uint32_t convert_bits(uint32_t word) {
  const uint32_t moved = (word & 0x80008000) | (word & 0x7F007F00) >> 1;
  uint32_t halves;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(moved), "r"(0x5C005C00));  // 2^8
  return halves;
}

__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
  return bytes;
}

__device__ __forceinline__ uint4 load(uint32_t address) {
  uint4 found;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(found.x), "=r"(found.y), "=r"(found.z), "=r"(found.w)
               : "r"(address));
  return found;
}

// Four values of each of two keys → what the eight become, folded into one word so that nothing is
// dropped.
template <bool kBits>
__device__ __forceinline__ uint32_t pairs(uint32_t one, uint32_t other) {
  const uint32_t low = permute(one, other, 0x5140), high = permute(one, other, 0x7362);
  if constexpr (kBits) {
    return convert_bits(low << 8) ^ convert_bits(low) ^ convert_bits(high << 8) ^
           convert_bits(high);
  } else {
    return convert(low) ^ convert(low >> 16) ^ convert(high) ^ convert(high >> 16);
  }
}

template <Step kStep>
constexpr int values_of_a_loop() {
  switch (kStep) {
    case Step::kConvert:
    case Step::kBits:
    case Step::kPermute:
      return 4 * kChains;
    case Step::kLoad:
      return 16 * 2;
    default:
      return 16 * 2;
  }
}

template <Step kStep>
__global__ void __launch_bounds__(512) run(uint32_t selector, long long* taken, uint32_t* sink) {
  unsigned char* tile = aligned_smem();
  for (int i = threadIdx.x; i < kTile / 4; i += blockDim.x) {
    reinterpret_cast<uint32_t*>(tile)[i] = i * 2654435761u & 0x77777777;
  }
  uint32_t chains[kChains];
  for (int j = 0; j < kChains; ++j) {
    chains[j] = (threadIdx.x * kChains + j) * 2654435761u;
  }
  __syncthreads();
  const long long began = clock64();
  for (int loop = 0; loop < kLoops; ++loop) {
    if constexpr (kStep == Step::kConvert) {
      for (int j = 0; j < kChains; ++j) {  // each loop's input is the output of the one before
        chains[j] = convert(chains[j]) ^ convert(chains[j] >> 16);
      }
    } else if constexpr (kStep == Step::kBits) {
      for (int j = 0; j < kChains; ++j) {
        chains[j] = convert_bits(chains[j]) ^ convert_bits(chains[j] << 8);
      }
    } else if constexpr (kStep == Step::kPermute) {
      for (int j = 0; j < kChains; ++j) {
        chains[j] = permute(chains[j], chains[(j + 1) % kChains], selector);
      }
    } else {
      const uint32_t offset = (loop * 1024 + threadIdx.x * 16) & (kTile / 2 - 1);
      const uint4 one = load(smem_address(tile) + offset),
                  other = load(smem_address(tile) + kTile / 2 + offset);
      if constexpr (kStep == Step::kLoad) {
        chains[0] ^= one.x ^ other.x;
        chains[1] ^= one.y ^ other.y;
        chains[2] ^= one.z ^ other.z;
        chains[3] ^= one.w ^ other.w;
      } else {
        constexpr bool kBits = kStep == Step::kAllBits;
        chains[0] ^= pairs<kBits>(one.x, other.x);
        chains[1] ^= pairs<kBits>(one.y, other.y);
        chains[2] ^= pairs<kBits>(one.z, other.z);
        chains[3] ^= pairs<kBits>(one.w, other.w);
      }
    }
  }
  __syncthreads();
  const long long ended = clock64();
  uint32_t all = 0;
  for (int j = 0; j < kChains; ++j) {
    all ^= chains[j];
  }
  sink[blockIdx.x * blockDim.x + threadIdx.x] = all;
  if (threadIdx.x == 0) {
    taken[blockIdx.x] = ended - began;
  }
}

// Every e4m3 value both ways, beside what it stands for.
__global__ void convert_each(uint32_t* out) {
  const uint32_t byte = threadIdx.x;
  out[byte] = convert(byte | byte << 8);
  out[256 + byte] = convert_bits(byte << 8 | byte << 24);
}

template <Step kStep>
void rows_of(Rows& rows, const char* what, long long* taken, uint32_t* sink) {
  for (const int threads : {128, 256, 384, 512}) {
    rows.row(std::string(what) + ", " + std::to_string(threads / 32) + " warps", "values per clock",
             [&] {
               const int sms = sm_count();
               const Launch how = {sms, threads, kTile + kKB};
               prepare(run<kStep>, how);
               for (int round = 0; round < 3; ++round) {
                 launch(run<kStep>, how, 0x2615u, taken, sink);
               }
               ok(cudaStreamSynchronize(stream()), "a kernel");
               const std::vector<long long> all = fetched(taken, sms);
               return double(kLoops) * values_of_a_loop<kStep>() * threads /
                      median({all.begin(), all.end()});
             });
  }
}

int main(int argc, char** argv) {
  return measured(argc, argv, [](Rows& rows) {
    auto* taken = allocated<long long>(256);
    auto* sink = allocated<uint32_t>(512 * 256);
    ok(cudaDeviceSynchronize(), "clearing");
    rows.row("values that bits convert otherwise than cvt, NaN aside", "wrong", [&] {
      convert_each<<<1, 256, 0, stream()>>>(sink);
      ok(cudaGetLastError(), "a launch");
      ok(cudaStreamSynchronize(stream()), "a kernel");
      const std::vector<uint32_t> found = fetched(sink, 512);
      int wrong = 0;
      for (int byte = 0; byte < 256; ++byte) {
        wrong += (byte & 0x7F) != 0x7F && found[byte] != found[256 + byte];
      }
      return wrong;
    });
    rows_of<Step::kConvert>(rows, "cvt.rn.f16x2.e4m3x2", taken, sink);
    rows_of<Step::kBits>(rows, "by bits: LOP3, shift, HMUL2", taken, sink);
    rows_of<Step::kPermute>(rows, "PRMT", taken, sink);
    rows_of<Step::kLoad>(rows, "ld.shared.v4", taken, sink);
    rows_of<Step::kAll>(rows, "ld.shared.v4, PRMT and cvt", taken, sink);
    rows_of<Step::kAllBits>(rows, "ld.shared.v4, PRMT and bits", taken, sink);
  });
}
