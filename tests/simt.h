// Runs the text of a CUDA kernel on a CPU, one thread block at a time: each thread is a fibre, and what a warp
// does together, a shuffle, is done when the last of its fibres has come to it.

#include <cuda_fp16.h>
#include <cuda_bf16.h>
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
inline uint32_t words[1024][1];  // what each thread shows the others

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

inline uint32_t exchange(uint32_t value, int other) {
  words[thread()][0] = value;
  meet_warp();
  const uint32_t got = words[thread() ^ other][0];
  meet_warp();
  return got;
}

}  // namespace simt

#define threadIdx (simt::Index{unsigned(simt::thread()), 0, 0})
#define blockIdx (simt::block_index)
#define gridDim (simt::grid)
#define __syncthreads() simt::meet(simt::block)
#define __shfl_xor_sync(mask, value, other) simt::exchange(value, other)

template <typename T>
T __ldg(const T* from) { return *from; }
using std::min;
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t(a) * b >> 32; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline uint32_t __float_as_uint(float x) { return reinterpret_cast<const uint32_t&>(x); }
inline float __uint_as_float(uint32_t x) { return reinterpret_cast<const float&>(x); }
