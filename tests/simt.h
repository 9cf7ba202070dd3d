// Runs the text of a CUDA kernel on a CPU, one thread block at a time: each thread is a fibre, and what a warp
// does together (a shuffle, a reduction, mma, stmatrix) is done when the last of its fibres has come to it.

#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#undef __shared__
#undef __global__
#undef __launch_bounds__
#undef __grid_constant__
#define __shared__ static
#define __global__ static
#define __launch_bounds__(...)
#define __grid_constant__

namespace simt {

struct Index {
  unsigned x, y, z;
};

struct Meeting {
  int wanted = 0, there = 0, round = 0;
};

struct Fibre {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 18);
  int index = 0;
  bool done = false;
};

inline std::vector<Fibre> fibres;
inline std::vector<Meeting> warps;
inline Meeting block;
inline ucontext_t scheduler;
inline Fibre* current;
inline Index block_index, grid;
inline std::function<void()> body;
inline uint32_t words[1024][6];  // what each thread shows the others

inline int thread() { return current->index; }

inline void meet(Meeting& meeting) {
  const int round = meeting.round;
  if (++meeting.there == meeting.wanted) {
    meeting.there = 0;
    ++meeting.round;
  }
  while (meeting.round == round) {
    swapcontext(&current->context, &scheduler);
  }
}

inline void meet_warp() { meet(warps[thread() / 32]); }

inline void run_fibre() {
  body();
  current->done = true;
  swapcontext(&current->context, &scheduler);
}

inline void launch(Index blocks, int threads, std::function<void()> kernel) {
  grid = blocks;
  body = kernel;
  for (unsigned z = 0; z < blocks.z; ++z) {
    for (unsigned y = 0; y < blocks.y; ++y) {
      for (unsigned x = 0; x < blocks.x; ++x) {
        block_index = {x, y, z};
        fibres = std::vector<Fibre>(threads);
        warps.assign(threads / 32, Meeting{32});
        block = Meeting{threads};
        for (int i = 0; i < threads; ++i) {
          Fibre& fibre = fibres[i];
          fibre.index = i;
          getcontext(&fibre.context);
          fibre.context.uc_stack.ss_sp = fibre.stack.data();
          fibre.context.uc_stack.ss_size = fibre.stack.size();
          makecontext(&fibre.context, run_fibre, 0);
        }
        for (int left = threads; left > 0;) {
          for (Fibre& fibre : fibres) {
            if (!fibre.done) {
              current = &fibre;
              swapcontext(&scheduler, &fibre.context);
              left -= fibre.done;
            }
          }
        }
      }
    }
  }
}

inline float element(uint32_t word, int half, const __half*) {
  const uint16_t bits = word >> 16 * half;
  return float(reinterpret_cast<const __half&>(bits));
}
inline float element(uint32_t word, int half, const __nv_bfloat16*) {
  const uint16_t bits = word >> 16 * half;
  return float(reinterpret_cast<const __nv_bfloat16&>(bits));
}

// PTX ISA, mma.m16n8k16: lane 4 g + q holds of a rows g and g + 8, columns 2 q and 2 q + 8 and their neighbours;
// of b the same rows of column g; of d rows g and g + 8, columns 2 q and 2 q + 1.
template <typename Element>
void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  std::memcpy(words[thread()], mine, sizeof(mine));
  meet_warp();
  const int first = thread() / 32 * 32, lane = thread() % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    d[i] = 0;
    for (int k = 0; k < 16; ++k) {
      const uint32_t a = words[first + row % 8 * 4 + k % 8 / 2][k / 8 * 2 + row / 8];
      const uint32_t b = words[first + column * 4 + k % 8 / 2][4 + k / 8];
      d[i] += element(a, k % 2, (Element*)nullptr) * element(b, k % 2, (Element*)nullptr);
    }
  }
  meet_warp();
}

inline uint32_t pack(float a, float b, float c, float d) {
  const float values[4] = {a, b, c, d};
  uint32_t packed = 0;
  for (int i = 0; i < 4; ++i) {
    packed |= uint32_t(__nv_cvt_float_to_fp8(values[i], __NV_SATFINITE, __NV_E4M3)) << 8 * i;
  }
  return packed;
}

inline char origin;  // of addresses in shared memory

// PTX ISA, stmatrix: lane 4 g + q holds elements 2 q and 2 q + 1 of row g; .trans makes rows of columns, and lane
// 8 m + r tells where row r of matrix m goes.
inline void stmatrix(uint32_t at, const uint32_t (&pairs)[4]) {
  const uint32_t mine[5] = {at, pairs[0], pairs[1], pairs[2], pairs[3]};
  std::memcpy(words[thread()], mine, sizeof(mine));
  meet_warp();
  const int first = thread() / 32 * 32, lane = thread() % 32;
  for (int m = 0; m < 4; ++m) {
    for (int e = 0; e < 2; ++e) {
      const int row = lane % 4 * 2 + e;
      char* to = &origin + int32_t(words[first + 8 * m + row][0]) + 2 * (lane / 4);
      const uint16_t item = pairs[m] >> 16 * e;
      std::memcpy(to, &item, 2);
    }
  }
  meet_warp();
}

inline uint32_t exchange(uint32_t value, int other) {
  words[thread()][0] = value;
  meet_warp();
  const uint32_t got = words[thread() ^ other][0];
  meet_warp();
  return got;
}

inline uint32_t reduce_max(uint32_t value) {
  words[thread()][0] = value;
  meet_warp();
  const int first = thread() / 32 * 32;
  for (int lane = 0; lane < 32; ++lane) {
    value = words[first + lane][0] > value ? words[first + lane][0] : value;
  }
  meet_warp();
  return value;
}

}  // namespace simt

#define threadIdx (simt::Index{unsigned(simt::thread()), 0, 0})
#define blockIdx (simt::block_index)
#define gridDim (simt::grid)
#define __syncthreads() simt::meet(simt::block)
#define __shfl_xor_sync(mask, value, other) simt::exchange(value, other)
#define __reduce_max_sync(mask, value) simt::reduce_max(value)
#define __popc __builtin_popcount
#define __cvta_generic_to_shared(p) (reinterpret_cast<const char*>(p) - &simt::origin)

template <typename T>
T __ldg(const T* from) { return *from; }
template <typename T>
T __ldcs(const T* from) { return *from; }

using std::min;
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t(a) * b >> 32; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline uint32_t __float_as_uint(float x) { return reinterpret_cast<const uint32_t&>(x); }
inline float __uint_as_float(uint32_t x) { return reinterpret_cast<const float&>(x); }

inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= uint32_t(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  }
  return result;
}
