// A Hopper GPU in C++, as far as fagen's kernels use one: their text, with asm statements turned into calls (see
// translate.py), runs thread by thread on a CPU.
//
// Threads are fibers, and what is asynchronous on a GPU is so here: copies and products happen at any time between
// their issue and what waits for them, drawn by chance from a seed. So a wait that is missing shows sooner or later as
// a wrong number, and a barrier nobody arrives at as a deadlock, told by who waits for what. Not modelled: time, the
// registers of a thread, and proxy fences.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static  // of a kernel whose blocks run one after another
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(...)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
using std::max, std::min;

// ---- Narrow numbers --------------------------------------------------------------------------

namespace sim {

template <class To, class From>
To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline uint16_t to_half(float x) { return bits<uint16_t>(_Float16(x)); }
inline float of_half(uint16_t x) { return float(bits<_Float16>(x)); }

inline uint16_t to_bfloat(float x) {
  const uint32_t b = bits<uint32_t>(x);
  return std::isnan(x) ? 0x7fff : uint16_t((b + 0x7fff + (b >> 16 & 1)) >> 16);
}
inline float of_bfloat(uint16_t x) { return bits<float>(uint32_t(x) << 16); }

inline float of_e4m3(uint8_t x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  const float size = (x & 127) == 127 ? NAN : exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
  return x & 128 ? -size : size;
}
// To the nearest, ties to even; what is too large becomes the largest.
inline uint8_t to_e4m3(float x) {
  const uint8_t sign = std::signbit(x) ? 128 : 0;
  if (std::isnan(x)) {
    return 127;
  }
  const float size = std::fabs(x);
  int exponent = 0;
  std::frexp(size, &exponent);
  const float unit = std::ldexp(1.f, std::max(exponent - 4, -9));
  const float rounded = std::nearbyint(size / unit) * unit;
  if (rounded >= 448.f) {
    return sign | 126;
  }
  std::frexp(rounded, &exponent);
  return rounded < 0x1p-6f ? sign | uint8_t(rounded * 512) : sign | uint8_t((exponent + 6) << 3 | (int(std::ldexp(rounded, 4 - exponent)) & 7));
}
inline uint32_t to_e4m3x2(float high, float low) { return to_e4m3(low) | to_e4m3(high) << 8; }

}  // namespace sim

struct __nv_fp8_e4m3 {
  uint8_t bits;
  operator float() const { return sim::of_e4m3(bits); }
};
struct __half { uint16_t bits; };
struct __nv_bfloat16 { uint16_t bits; };
struct alignas(4) __half2 { __half x, y; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
inline __half2 __floats2half2_rn(float x, float y) { return {{sim::to_half(x)}, {sim::to_half(y)}}; }
inline float2 __half22float2(__half2 a) { return {sim::of_half(a.x.bits), sim::of_half(a.y.bits)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {{sim::to_bfloat(x)}, {sim::to_bfloat(y)}}; }
inline float2 __bfloat1622float2(__nv_bfloat162 a) { return {sim::of_bfloat(a.x.bits), sim::of_bfloat(a.y.bits)}; }

inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  const float2 x = __half22float2(a), y = __half22float2(b), z = __half22float2(c);
  return __floats2half2_rn(std::fma(x.x, y.x, z.x), std::fma(x.y, y.y, z.y));
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  const float2 x = __bfloat1622float2(a), y = __bfloat1622float2(b), z = __bfloat1622float2(c);
  return __floats2bfloat162_rn(std::fma(x.x, y.x, z.x), std::fma(x.y, y.y, z.y));
}
inline bool __hbeq2(__half2 a, __half2 b) {
  const float2 x = __half22float2(a), y = __half22float2(b);
  return x.x == y.x && x.y == y.y;
}
inline bool __hbeq2(__nv_bfloat162 a, __nv_bfloat162 b) {
  const float2 x = __bfloat1622float2(a), y = __bfloat1622float2(b);
  return x.x == y.x && x.y == y.y;
}

template <class T>
T __ldcg(const T* from) {
  return *from;
}
template <class T>
T __ldg(const T* from) {
  return *from;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(uint32_t x) { return __builtin_ffs(int(x)); }
template <class T>
void __stcg(T* to, T value) {
  *to = value;
}
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fdividef(float a, float b) { return a / b; }
inline int __clz(uint32_t x) { return x ? __builtin_clz(x) : 32; }
inline uint32_t atomicInc(uint32_t* at, uint32_t most) {
  const uint32_t before = *at;
  *at = before >= most ? 0 : before + 1;
  return before;
}
inline uint32_t atomicAdd(uint32_t* to, uint32_t more) {
  const uint32_t before = *to;
  *to = before + more;
  return before;
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = x | uint64_t(y) << 32;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) {
    found |= uint32_t(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  }
  return found;
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t(a) * b >> 32; }
inline float __uint_as_float(uint32_t x) { return sim::bits<float>(x); }
inline uint32_t __float_as_uint(float x) { return sim::bits<uint32_t>(x); }

// ---- Threads ---------------------------------------------------------------------------------

namespace sim {

constexpr int kWarp = 32;
constexpr size_t kStack = 256 << 10;
constexpr size_t kSharedBytes = 256 << 10;

struct Block;

// What a thread waits for: a test of an object and a number, and how it is called.
struct Wait {
  bool (*test)(const void*, uint64_t) = nullptr;
  const void* object = nullptr;
  uint64_t value = 0;
  const char* what = "";
};

// A copy out of shared memory by the bulk engine: it reads at some time, and writes at some later time.
struct BulkStore {
  std::function<std::vector<char>()> read;
  std::function<void(const std::vector<char>&)> write;
  uint64_t due = 0;  // the turn in which it goes on
  std::vector<char> data;
  int done = 0;  // 1: read, 2: written

  void advance() {
    if (done++ == 0) {
      data = read();
    } else {
      write(data);
    }
  }
};

struct Thread {
  ucontext_t entry;
  jmp_buf place;  // where it goes on, once it has been entered
  bool entered = false;
  void* stack = nullptr;
  Block* block;
  int index;
  bool ended = false;
  Wait wait;
  uint64_t passed = 0;  // phases of mbarriers that it has waited for, or found passed
  const uint32_t* watched = nullptr;  // global memory that it last looked at, and what it saw there
  uint32_t seen = 0;
  std::vector<std::shared_ptr<BulkStore>> open_stores;
  std::deque<std::vector<std::shared_ptr<BulkStore>>> stores;  // groups, oldest first
};

// A product under way: it reads its operands and adds to the accumulators of a warp's threads when it happens.
using Product = std::function<void()>;

struct Warp {
  uint64_t values[2][kWarp][4];  // that the lanes show each other, this time and the next
  int arrived[2] = {};
  uint64_t meetings[kWarp] = {};  // that a lane has come to
  uint64_t met = 0;               // that all lanes have come to
  int living = 0;
  std::deque<std::pair<uint64_t, Product>> products;  // with the group of each
  uint64_t groups = 0;                                // committed
  uint64_t resumes = 0;                               // the turn in which it goes on; it has fallen behind
};

struct NamedBarrier {
  int arrived = 0;
  uint64_t generation = 0;
  uint64_t said[2] = {};  // the last even and odd generation of which anyone said so, 1 more than that
};

struct Block {
  dim3 index;
  int rank = 0;  // in its cluster
  std::vector<Block*> cluster;
  char* shared;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  NamedBarrier barriers[17];  // the last of them is the cluster's
  int living = 0;
};

struct Machine {
  std::mt19937_64 random{1};
  jmp_buf scheduler;
  Thread* current = nullptr;
  dim3 grid, block;
  uint64_t turn = 0;                                           // of all threads
  std::vector<std::pair<uint64_t, std::function<void()>>> copies;  // that TMA makes in a turn to come
  std::vector<std::shared_ptr<BulkStore>> bulk_stores;         // likewise
  const std::function<void()>* body = nullptr;
  bool failed = false;
  std::string said;  // why
  bool notes = false;  // launches are noted, and nothing runs
  std::string noted;   // their grids
  std::vector<void*> stacks;
  std::vector<char*> memories;

  bool chance(int one_in) { return random() % one_in == 0; }

  // How many turns something takes: often none, now and then very many.
  uint64_t delay() {
    const uint64_t most[] = {1, 4, 30, 300};
    return random() % most[random() % 4];
  }
};

inline Machine machine;

inline Thread& self() { return *machine.current; }
inline Warp& warp() { return self().block->warps[self().index / kWarp]; }
inline int lane() { return self().index % kWarp; }

// By jumps, since swapcontext asks the kernel for the mask of signals each time.
inline void give_way() {
  if (_setjmp(self().place) == 0) {
    _longjmp(machine.scheduler, 1);
  }
}

inline void go_on(Thread& thread) {
  machine.current = &thread;
  if (_setjmp(machine.scheduler) == 0) {
    if (thread.entered) {
      _longjmp(thread.place, 1);
    }
    thread.entered = true;
    setcontext(&thread.entry);
  }
}

[[noreturn]] inline void leave() { _longjmp(machine.scheduler, 1); }  // for good

inline std::string told(const dim3& b) {
  return "block (" + std::to_string(b.x) + ", " + std::to_string(b.y) + ", " + std::to_string(b.z) + ")";
}

[[noreturn]] inline void fail(const std::string& said) {
  const dim3& b = self().block->index;
  machine.said = told(b) + ", thread " + std::to_string(self().index) + ": " + said;
  machine.failed = true;
  leave();
}

inline void wait_for(const Wait& wait) {
  if (!wait.test(wait.object, wait.value) || machine.chance(8)) {  // others may go first
    self().wait = wait;
    give_way();
  }
  self().watched = nullptr;
}

// ---- What is asynchronous --------------------------------------------------------------------

inline void happen(Warp& warp) {
  auto product = std::move(warp.products.front().second);
  warp.products.pop_front();
  product();
}

// Lets happen what is due, or, if it has to be, the next that will be; returns whether anything did.
inline bool something_happens(bool has_to) {
  Machine& m = machine;
  uint64_t now = m.turn;
  if (has_to) {
    now = UINT64_MAX;
    for (const auto& copy : m.copies) {
      now = std::min(now, copy.first);
    }
    for (const auto& store : m.bulk_stores) {
      now = std::min(now, store->due);
    }
  }
  bool any = false;
  for (size_t i = 0; i < m.copies.size();) {
    if (m.copies[i].first > now) {
      ++i;
      continue;
    }
    const auto copy = std::move(m.copies[i].second);
    m.copies.erase(m.copies.begin() + i);
    copy();
    any = true;
  }
  for (size_t i = 0; i < m.bulk_stores.size();) {
    BulkStore& store = *m.bulk_stores[i];
    if (store.due > now) {
      ++i;
      continue;
    }
    store.advance();
    store.due = m.turn + m.delay();
    any = true;
    if (store.done == 2) {
      m.bulk_stores.erase(m.bulk_stores.begin() + i);
    }
  }
  return any;
}

// ---- Running a grid --------------------------------------------------------------------------

inline void enter() {
  (*machine.body)();
  Thread& thread = self();
  thread.ended = true;
  --thread.block->living;
  --warp().living;
  leave();
}

inline void* new_stack() {
  if (machine.stacks.empty()) {
    return mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  void* stack = machine.stacks.back();
  machine.stacks.pop_back();
  return stack;
}

inline char* new_memory() {
  char* memory;
  if (machine.memories.empty()) {
    memory = static_cast<char*>(std::aligned_alloc(kSharedBytes, kSharedBytes));
  } else {
    memory = machine.memories.back();
    machine.memories.pop_back();
  }
  std::memset(memory, 0xff, kSharedBytes);  // NaN in every format
  return memory;
}

inline std::unique_ptr<Block> new_block(unsigned flat, int threads) {
  auto block = std::make_unique<Block>();
  const dim3& grid = machine.grid;
  block->index = {flat % grid.x, flat / grid.x % grid.y, flat / grid.x / grid.y};
  block->shared = new_memory();
  block->threads.resize(threads);
  block->warps.resize((threads + kWarp - 1) / kWarp);
  block->living = threads;
  for (int i = 0; i < threads; ++i) {
    Thread& thread = block->threads[i];
    thread.block = block.get();
    thread.index = i;
    ++block->warps[i / kWarp].living;
    thread.stack = new_stack();
    getcontext(&thread.entry);
    thread.entry.uc_stack.ss_sp = thread.stack;
    thread.entry.uc_stack.ss_size = kStack;
    thread.entry.uc_link = nullptr;
    makecontext(&thread.entry, enter, 0);
  }
  return block;
}

inline void tell_deadlock(const std::vector<std::unique_ptr<Block>>& blocks) {
  machine.said = "nobody can go on";
  for (const auto& block : blocks) {
    std::map<std::string, std::pair<int, int>> waiting;  // first thread, count
    for (const Thread& thread : block->threads) {
      if (!thread.ended) {
        const auto offset = static_cast<const char*>(thread.wait.object) - block->shared;
        std::string said = thread.wait.what;
        if (offset >= 0 && offset < int64_t(kSharedBytes)) {
          said += " at byte " + std::to_string(offset) + " of shared memory, parity " + std::to_string(thread.wait.value);
        }
        ++waiting.try_emplace(said, thread.index, 0).first->second.second;
      }
    }
    for (const auto& [said, who] : waiting) {
      machine.said += "\n  " + told(block->index) + ": " + std::to_string(who.second) + " threads from " + std::to_string(who.first) + " on wait " + said;
    }
  }
}

// Lets warps that have fallen behind go on; returns whether there were any.
inline bool wake(const std::vector<std::unique_ptr<Block>>& blocks) {
  bool any = false;
  for (const auto& block : blocks) {
    for (Warp& warp : block->warps) {
      any |= warp.living > 0 && warp.resumes > machine.turn;
      warp.resumes = 0;
    }
  }
  return any;
}

// Runs every thread of a grid to its end, `resident` blocks at a time, clusters together.
inline bool run(dim3 grid, dim3 shape, int cluster, int resident, const std::function<void()>& body) {
  Machine& m = machine;
  m.grid = grid;
  m.block = shape;
  m.body = &body;
  const unsigned blocks = grid.x * grid.y * grid.z;
  const int threads = shape.x * shape.y * shape.z;
  unsigned next = 0;
  std::vector<std::unique_ptr<Block>> running;
  while (!m.failed && (next < blocks || !running.empty())) {
    while (next < blocks && int(running.size()) + cluster <= std::max(cluster, resident)) {
      std::vector<Block*> together;
      for (int rank = 0; rank < cluster; ++rank) {
        running.push_back(new_block(next++, threads));
        running.back()->rank = rank;
        together.push_back(running.back().get());
      }
      for (Block* block : together) {
        block->cluster = together;
      }
    }
    bool progress = false;
    ++m.turn;
    for (const auto& block : running) {
      const int start = m.random() % threads;
      for (int i = 0; i < threads && !m.failed; ++i) {
        Thread& thread = block->threads[(start + i) % threads];
        const Warp& warp = block->warps[thread.index / kWarp];
        if (thread.ended || warp.resumes > m.turn || (thread.wait.test && !thread.wait.test(thread.wait.object, thread.wait.value))) {
          continue;
        }
        progress = true;
        thread.wait = {};
        go_on(thread);
      }
      for (Warp& warp : block->warps) {
        while (!warp.products.empty() && m.chance(3)) {
          happen(warp);
        }
        if (m.turn > warp.resumes && m.chance(30)) {
          warp.resumes = m.turn + m.delay();
        }
      }
    }
    progress |= something_happens(false);
    if (!progress && !something_happens(true) && !wake(running)) {
      tell_deadlock(running);
      m.failed = true;
    }
    for (size_t i = 0; i < running.size();) {
      const auto& together = running[i]->cluster;
      const bool ended = std::all_of(together.begin(), together.end(), [](const Block* b) { return b->living == 0; });
      if (!ended) {
        i += together.size();
        continue;
      }
      for (size_t rank = 0; rank < together.size(); ++rank) {
        for (Thread& thread : running[i + rank]->threads) {
          m.stacks.push_back(thread.stack);
        }
        m.memories.push_back(running[i + rank]->shared);
      }
      running.erase(running.begin() + i, running.begin() + i + together.size());
    }
  }
  while (!m.failed && something_happens(true)) {
  }
  m.copies.clear();
  m.bulk_stores.clear();
  return !m.failed;
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, int cluster, const Arguments&... arguments) {
  const std::string said = std::to_string(grid.x) + " " + std::to_string(grid.y) + " " + std::to_string(grid.z);
  if (grid.x - 1u >= 0x7fffffffu || grid.y - 1u >= 65535u || grid.z - 1u >= 65535u) {
    machine.failed = true;
    machine.said = "a grid of " + said + " thread blocks, which no GPU takes";
  } else if (machine.notes) {
    machine.noted += said + "\n";
  } else if (!machine.failed) {
    const std::function<void()> body = [&] { kernel(arguments...); };
    run(grid, block, cluster, shared ? 2 + cluster : 1, body);
  }
}

// ---- Meeting ---------------------------------------------------------------------------------

inline bool warp_met(const void* object, uint64_t meeting) { return static_cast<const Warp*>(object)->met >= meeting; }

// All lanes of a warp show each other numbers.
template <class... T>
const uint64_t (*meet(T... shown))[4] {
  Warp& w = warp();
  const uint64_t meeting = ++w.meetings[lane()];
  const int turn = meeting % 2;
  const uint64_t numbers[] = {uint64_t(shown)..., 0};
  std::copy_n(numbers, sizeof...(shown), w.values[turn][lane()]);
  if (++w.arrived[turn] == w.living) {
    w.arrived[turn] = 0;
    w.met = meeting;
  }
  wait_for({warp_met, &w, meeting, "for the other lanes of the warp"});
  return w.values[turn];
}

inline bool named_passed(const void* object, uint64_t generation) {
  return static_cast<const NamedBarrier*>(object)->generation > generation;
}

inline NamedBarrier& arrive_named(NamedBarrier& barrier, int count, uint64_t& generation) {
  generation = barrier.generation;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  return barrier;
}

inline void bar_sync(int id, int count) {
  meet();
  uint64_t generation;
  NamedBarrier& barrier = arrive_named(self().block->barriers[id], count, generation);
  static const char* const kNames[] = {"at named barrier 0", "at named barrier 1", "at named barrier 2", "at named barrier 3",
                                       "at named barrier 4", "at named barrier 5", "at named barrier 6", "at named barrier 7",
                                       "at named barrier 8 or above"};
  wait_for({named_passed, &barrier, generation, kNames[std::min(id, 8)]});
}

// The same, and whether any of them says so.
inline bool bar_red_or(int id, int count, bool said) {
  NamedBarrier& barrier = self().block->barriers[id];
  const uint64_t generation = barrier.generation;
  uint64_t& last = barrier.said[generation % 2];
  if (said) {
    last = generation + 1;
  }
  bar_sync(id, count);
  return last == generation + 1;
}

inline void bar_arrive(int id, int count) {
  meet();
  uint64_t generation;
  arrive_named(self().block->barriers[id], count, generation);
}

inline void cluster_sync() {
  Block& first = *self().block->cluster[0];
  int count = 0;
  for (const Block* block : first.cluster) {
    count += block->living;
  }
  uint64_t generation;
  NamedBarrier& barrier = arrive_named(first.barriers[16], count, generation);
  wait_for({named_passed, &barrier, generation, "for the cluster"});
}

template <class T>
T from_lane(const uint64_t (*shown)[4], int other) {
  if constexpr (sizeof(T) == 4) {
    return bits<T>(uint32_t(shown[other][0]));
  } else {
    return T(shown[other][0]);
  }
}

template <class T>
uint64_t as_shown(T value) {
  if constexpr (sizeof(T) == 4) {
    return bits<uint32_t>(value);
  } else {
    return uint64_t(value);
  }
}

// ---- Shared memory ---------------------------------------------------------------------------

constexpr int kRankShift = 24;  // addresses of a cluster: which block, and the byte in its memory

inline uint32_t shared_address(const void* pointer) {
  for (const Block* block : self().block->cluster) {
    const auto offset = static_cast<const char*>(pointer) - block->shared;
    if (offset >= 0 && offset < int64_t(kSharedBytes)) {
      return block == self().block ? uint32_t(offset) : uint32_t(offset) | uint32_t(block->rank + 1) << kRankShift;
    }
  }
  fail("an address of shared memory is not in it");
}

inline char* at(uint32_t address) {
  Block* const own = self().block;
  const int rank = int(address >> kRankShift) - 1;
  return (rank < 0 ? own : own->cluster[rank])->shared + address % (1u << kRankShift);
}

// The address in another block of the cluster of what lies at the same place.
inline uint32_t mapa(uint32_t address, int rank) { return address % (1u << kRankShift) | uint32_t(rank + 1) << kRankShift; }

inline uint32_t swizzled(uint32_t address, int bits) { return address ^ (address >> 3 & ((1u << bits) - 1) << 4); }

inline bool mbarrier_passed(const void* object, uint64_t parity);

// Whether all lanes of a thread's warp have passed as many mbarriers as it has, or are held up by something else.
inline bool in_step(const void* object, uint64_t) {
  const Thread& own = *static_cast<const Thread*>(object);
  const int first = own.index / kWarp * kWarp;
  for (int i = first; i < std::min<int>(first + kWarp, own.block->threads.size()); ++i) {
    const Thread& other = own.block->threads[i];
    const Wait& wait = other.wait;
    const bool elsewhere = wait.test && wait.test != mbarrier_passed && (wait.test == in_step || !wait.test(wait.object, wait.value));
    if (!other.ended && other.passed < own.passed && !elsewhere) {
      return false;
    }
  }
  return true;
}

// A warp's lanes go through instructions together: none arrives while another has yet to see what it has waited for.
inline void keep_step() { wait_for({in_step, &self(), 0, "for its warp"}); }

// An mbarrier: 8 bytes of shared memory.
struct MBarrier {
  uint16_t phase : 1, expected : 15;
  int16_t pending;
  int32_t bytes;

  void settle() {
    if (pending == 0 && bytes == 0) {
      phase ^= 1;
      pending = expected;
    }
  }
  void init(int count) { *this = {0, uint16_t(count), int16_t(count), 0}; }
  void arrive() {
    keep_step();
    take(1);
  }
  void take(int count) {
    if (pending < count) {
      fail("more arrive at the mbarrier at byte " + std::to_string(shared_address(this)) + " than its " +
           std::to_string(expected));
    }
    pending -= count;
    settle();
  }
  void complete(int count) {
    bytes -= count;
    settle();
  }
  void wait(uint32_t parity) const {
    wait_for({mbarrier_passed, this, parity, "for the mbarrier"});
    ++self().passed;
  }
};
static_assert(sizeof(MBarrier) == 8);

inline bool mbarrier_passed(const void* object, uint64_t parity) { return static_cast<const MBarrier*>(object)->phase != parity; }

// ---- Tensor maps -----------------------------------------------------------------------------

struct alignas(64) TensorMap {
  char* data;
  int rank, element, swizzle_bits;
  uint64_t sizes[5], strides[5];  // strides in bytes
  uint32_t box[5];

  int bytes() const {
    int product = element;
    for (int i = 0; i < rank; ++i) {
      product *= box[i];
    }
    return product;
  }

  // Calls visit(bytes in shared memory from the box's start, address in global memory or null) for each element.
  template <class Visit>
  void each(const std::array<int, 5>& from, Visit visit) const {
    const int count = bytes() / element;
    for (int flat = 0; flat < count; ++flat) {
      int rest = flat;
      bool inside = true;
      uint64_t offset = 0;
      for (int i = 0; i < rank; ++i) {
        const int64_t at = from[i] + rest % int(box[i]);
        rest /= int(box[i]);
        inside &= at >= 0 && at < int64_t(sizes[i]);
        offset += uint64_t(at) * strides[i];  // wraps around, as a ragged map wants it
      }
      visit(uint32_t(flat * element), inside ? reinterpret_cast<char*>(uint64_t(data) + offset) : nullptr);
    }
  }
};
static_assert(sizeof(TensorMap) <= 192);

// At the same place in a block of the cluster.
template <class T>
T* in_block(Block* block, T* own) {
  return reinterpret_cast<T*>(block->shared + (reinterpret_cast<char*>(own) - self().block->shared));
}

inline void load(const TensorMap& map, MBarrier& own_full, char* own_to, std::array<int, 5> from, Block* block) {
  MBarrier& full = *in_block(block, &own_full);
  char* const to = in_block(block, own_to);
  machine.copies.emplace_back(machine.turn + machine.delay(), [map, &full, to, from, block] {
    const uint32_t start = to - block->shared;
    map.each(from, [&](uint32_t offset, const char* address) {
      char* const into = block->shared + swizzled(start + offset, map.swizzle_bits);
      if (address) {
        std::memcpy(into, address, map.element);
      } else {
        std::memset(into, 0, map.element);
      }
    });
    full.complete(map.bytes());
  });
}

inline void enqueue(BulkStore store) {
  auto shared = std::make_shared<BulkStore>(std::move(store));
  shared->due = machine.turn + machine.delay();
  self().open_stores.push_back(shared);
  machine.bulk_stores.push_back(std::move(shared));
}

inline void store(const TensorMap& map, const char* from, std::array<int, 5> to) {
  Block* const block = self().block;
  enqueue({[map, from, block] {
             std::vector<char> data(map.bytes());
             const uint32_t start = from - block->shared;
             for (uint32_t i = 0; i < data.size(); i += map.element) {
               std::memcpy(&data[i], block->shared + swizzled(start + i, map.swizzle_bits), map.element);
             }
             return data;
           },
           [map, to](const std::vector<char>& data) {
             map.each(to, [&](uint32_t offset, char* address) {
               if (address) {
                 std::memcpy(address, &data[offset], map.element);
               }
             });
           }});
}

inline void bulk_load(const void* from, MBarrier& full, void* to, int bytes) {
  machine.copies.emplace_back(machine.turn + machine.delay(), [=, &full] {
    std::memcpy(to, from, bytes);
    full.complete(bytes);
  });
}

inline void copy_to_peer(uint32_t to, uint32_t from, int bytes, uint32_t full) {
  char* const into = at(to);
  const char* const source = at(from);
  MBarrier& barrier = *reinterpret_cast<MBarrier*>(at(full));
  machine.copies.emplace_back(machine.turn + machine.delay(), [=, &barrier] {
    std::memcpy(into, source, bytes);
    barrier.complete(bytes);
  });
}

inline void bulk_add(void* to, uint32_t from, int bytes) {
  const char* const source = at(from);
  enqueue({[=] { return std::vector<char>(source, source + bytes); },
           [=](const std::vector<char>& data) {
             for (int i = 0; i < bytes / 4; ++i) {
               static_cast<float*>(to)[i] += reinterpret_cast<const float*>(data.data())[i];
             }
           }});
}

inline void bulk_store(void* to, uint32_t from, int bytes) {
  const char* const source = at(from);
  enqueue({[=] { return std::vector<char>(source, source + bytes); },
           [=](const std::vector<char>& data) { std::memcpy(to, data.data(), bytes); }});
}

inline void bulk_commit() {
  self().stores.push_back(std::move(self().open_stores));
  self().open_stores.clear();
}

// Waits until all but the newest `pending` groups have been read, or (done = 2) written.
inline void bulk_wait(size_t pending, int done) {
  auto& stores = self().stores;
  for (size_t group = 0; group + pending < stores.size(); ++group) {
    for (auto& one : stores[group]) {
      while (one->done < done) {
        one->advance();
      }
    }
  }
  while (stores.size() > pending && std::all_of(stores.front().begin(), stores.front().end(), [](auto& one) { return one->done == 2; })) {
    stores.pop_front();
  }
  auto& under_way = machine.bulk_stores;
  under_way.erase(std::remove_if(under_way.begin(), under_way.end(), [](auto& one) { return one->done == 2; }), under_way.end());
}

// ---- Tensor cores ----------------------------------------------------------------------------

enum class Number { kHalf, kBfloat, kE4m3 };

inline float number(Number type, const char* from) {
  if (type == Number::kE4m3) {
    return of_e4m3(uint8_t(*from));
  }
  uint16_t raw;
  std::memcpy(&raw, from, 2);
  return type == Number::kHalf ? of_half(raw) : of_bfloat(raw);
}

// An operand in shared memory as its descriptor says: rows along M or N, by columns along K; `transposed`: M or N is
// what lies side by side.
struct Operand {
  uint64_t descriptor;
  bool transposed;

  float read(const char* shared, Number type, int row, int k) const {
    const int element = type == Number::kE4m3 ? 1 : 2;
    const uint32_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4,
                   stride = (descriptor >> 32 & 0x3fff) << 4;
    const int layout = descriptor >> 62;  // 1: swizzled by 128 bytes, 2: by 64, 3: by 32
    const int swizzle_bits = layout == 0 ? 0 : 4 - layout;
    const int span = 16 << swizzle_bits;  // bytes of a row of the pattern
    const int across = (transposed ? row : k) * element, down = transposed ? k : row;
    const uint32_t offset = across / span * leading + down / 8 * stride + down % 8 * span + across % span;
    if (!transposed && layout != 0 && across >= span) {
      fail("a K-major operand of wgmma is wider than its swizzle");
    }
    return number(type, shared + swizzled(start + offset, swizzle_bits));
  }
};

// A warp's 16 rows of wgmma: A from shared memory or registers, B from shared memory.
template <int n, int k>
void wgmma(Number type, std::array<float*, n / 2> c, std::array<uint32_t, 4> a_registers, bool in_registers, uint64_t a,
           uint64_t b, bool accumulate, bool a_transposed, bool b_transposed) {
  Warp& w = warp();
  struct Collected {
    std::array<std::array<float*, n / 2>, kWarp> c;
    std::array<std::array<uint32_t, 4>, kWarp> a;
  };
  // each lane's pointers live on its stack until all lanes have met a second time
  const auto* shown = meet(uint64_t(&c), uint64_t(&a_registers));
  if (lane() == 0) {
    auto all = std::make_shared<Collected>();
    for (int i = 0; i < kWarp; ++i) {
      all->c[i] = *reinterpret_cast<const std::array<float*, n / 2>*>(shown[i][0]);
      all->a[i] = *reinterpret_cast<const std::array<uint32_t, 4>*>(shown[i][1]);
    }
    const char* const shared = self().block->shared;
    const int first_row = self().index / kWarp % 4 * 16;
    w.products.emplace_back(w.groups, [=] {
      static float left[16][k], right[k][n], sum[16][n];
      for (int row = 0; row < 16; ++row) {
        for (int column = 0; column < k; ++column) {
          if (in_registers) {
            constexpr int per = k / 8;  // elements of a register
            const int half = column / (k / 2), within = column % (k / 2);
            const uint32_t word = all->a[row % 8 * 4 + within / per][row / 8 + 2 * half];
            left[row][column] = number(type, reinterpret_cast<const char*>(&word) + within % per * (4 / per));
          } else {
            left[row][column] = Operand{a, a_transposed}.read(shared, type, first_row + row, column);
          }
        }
      }
      for (int column = 0; column < k; ++column) {
        for (int j = 0; j < n; ++j) {
          right[column][j] = Operand{b, b_transposed}.read(shared, type, j, column);
        }
      }
      for (int row = 0; row < 16; ++row) {
        std::fill_n(sum[row], n, 0.f);
        for (int column = 0; column < k; ++column) {
          for (int j = 0; j < n; ++j) {
            sum[row][j] += left[row][column] * right[column][j];
          }
        }
      }
      for (int i = 0; i < kWarp; ++i) {
        for (int j = 0; j < n / 2; ++j) {
          float& into = *all->c[i][j];
          into = (accumulate ? into : 0.f) + sum[i / 4 + j / 2 % 2 * 8][j / 4 * 8 + i % 4 * 2 + j % 2];
        }
      }
    });
  }
  meet();
}

inline void wgmma_commit() {
  meet();
  if (lane() == 0) {
    ++warp().groups;
  }
  meet();
}

inline void wgmma_wait(uint64_t pending) {
  Warp& w = warp();
  meet();
  if (lane() == 0) {
    while (!w.products.empty() && w.products.front().first + pending < w.groups) {
      happen(w);
    }
  }
  meet();
}

// ---- Global memory ---------------------------------------------------------------------------

inline bool changed(const void* object, uint64_t seen) { return *static_cast<const uint32_t*>(object) != seen; }

// Whoever looks again at what has not changed waits until it has.
inline uint32_t load_acquire(const uint32_t* from) {
  Thread& thread = self();
  if (thread.watched == from) {
    wait_for({changed, from, thread.seen, "for a number in global memory to change"});
  }
  thread.watched = from;  // until it waits for something else
  return thread.seen = *from;
}

// ---- Matrices of a warp ----------------------------------------------------------------------

// Some 8x8 matrices of 16-bit elements, lane 8 i + j giving the address of row j of matrix i.
template <int count>
void stmatrix(uint32_t address, std::array<uint32_t, count> some, bool transposed) {
  std::array<uint32_t, 4> given = {};
  std::copy_n(some.begin(), count, given.begin());
  const auto* shown = meet(uint64_t(address), uint64_t(given[0]) | uint64_t(given[1]) << 32, uint64_t(given[2]) | uint64_t(given[3]) << 32);
  if (lane() == 0) {
    for (int matrix = 0; matrix < count; ++matrix) {
      for (int row = 0; row < 8; ++row) {
        for (int column = 0; column < 8; ++column) {
          const int r = transposed ? column : row, c = transposed ? row : column;
          const uint64_t pair = shown[r * 4 + c / 2][1 + matrix / 2];
          const uint16_t element = uint32_t(pair >> matrix % 2 * 32) >> c % 2 * 16;
          std::memcpy(at(uint32_t(shown[matrix * 8 + row][0])) + column * 2, &element, 2);
        }
      }
    }
  }
  meet();
}

inline std::array<uint32_t, 4> ldmatrix(uint32_t address, bool transposed) {
  const auto* shown = meet(uint64_t(address));
  std::array<uint32_t, 4> found;
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t pair[2];
    for (int i = 0; i < 2; ++i) {
      const int r = lane() / 4, c = lane() % 4 * 2 + i;
      const int row = transposed ? c : r, column = transposed ? r : c;
      std::memcpy(&pair[i], at(uint32_t(shown[matrix * 8 + row][0])) + column * 2, 2);
    }
    found[matrix] = pair[0] | uint32_t(pair[1]) << 16;
  }
  meet();
  return found;
}

}  // namespace sim

#define threadIdx (sim::dim3_of(sim::self().index))
#define blockIdx (sim::self().block->index)
#define blockDim (sim::machine.block)
#define gridDim (sim::machine.grid)
namespace sim {
inline dim3 dim3_of(int index) { return {unsigned(index), 0, 0}; }
}  // namespace sim

inline void __syncthreads() { sim::bar_sync(0, sim::self().block->living); }
inline int __syncthreads_or(int said) { return sim::bar_red_or(0, sim::self().block->living, said); }
inline void __syncwarp(unsigned = ~0u) { sim::meet(); }
template <class T>
T __shfl_sync(unsigned, T value, int from) {
  return sim::from_lane<T>(sim::meet(sim::as_shown(value)), from);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int other) {
  return sim::from_lane<T>(sim::meet(sim::as_shown(value)), sim::lane() ^ other);
}

template <class T>
T __shfl_sync(unsigned, T value, int from, int width) {
  return sim::from_lane<T>(sim::meet(sim::as_shown(value)), sim::lane() / width * width + from % width);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int step, int width = sim::kWarp) {
  const int own = sim::lane();
  return sim::from_lane<T>(sim::meet(sim::as_shown(value)), own % width >= step ? own - step : own);
}
inline int __reduce_max_sync(unsigned, int value) {
  const auto* shown = sim::meet(uint64_t(uint32_t(value)));
  int found = value;
  for (int i = 0; i < sim::kWarp; ++i) {
    found = std::max(found, int(uint32_t(shown[i][0])));
  }
  return found;
}

inline uint32_t __ballot_sync(unsigned, bool vote) {
  const auto* shown = sim::meet(uint64_t(vote));
  uint32_t votes = 0;
  for (int i = 0; i < sim::kWarp; ++i) {
    votes |= uint32_t(shown[i][0]) << i;
  }
  return votes;
}
inline int __reduce_add_sync(unsigned, int value) {
  const auto* shown = sim::meet(uint64_t(uint32_t(value)));
  uint32_t sum = 0;
  for (int i = 0; i < sim::kWarp; ++i) {
    sum += uint32_t(shown[i][0]);
  }
  return int(sum);
}
inline uint32_t __reduce_or_sync(unsigned, uint32_t value) {
  const auto* shown = sim::meet(uint64_t(value));
  uint32_t all = 0;
  for (int i = 0; i < sim::kWarp; ++i) {
    all |= uint32_t(shown[i][0]);
  }
  return all;
}
inline bool __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) == ~0u; }
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }

// ---- CUTLASS and the CUDA runtime ------------------------------------------------------------

namespace cutlass::arch {

struct ClusterBarrier : sim::MBarrier {
  using MBarrier::arrive;
  void arrive(uint32_t rank, uint32_t = true) { sim::in_block(sim::self().block->cluster[rank], static_cast<MBarrier*>(this))->arrive(); }
  // Who finds it passed has no need to wait for it, while another lane of the warp has.
  bool test_wait(uint32_t parity) const {
    const bool passed = sim::mbarrier_passed(this, parity) && !sim::machine.chance(4);
    sim::self().passed += passed;
    return passed;
  }
  bool try_wait(uint32_t parity) const { return test_wait(parity); }
};
struct ClusterTransactionBarrier : ClusterBarrier {
  void arrive_and_expect_tx(int count) {
    bytes += count;
    arrive();
  }
};
inline void fence_barrier_init() {}
inline void fence_view_async_shared() {}
template <int count>
void warpgroup_reg_alloc() {}
template <int count>
void warpgroup_reg_dealloc() {}

}  // namespace cutlass::arch

using CUtensorMap = sim::TensorMap;

namespace cute {

namespace SM90::GMMA {
enum class LayoutType : uint8_t { INTERLEAVE = 0, B128 = 1, B64 = 2, B32 = 3 };
}
namespace TMA {
enum class CacheHintSm90 : uint64_t { EVICT_NORMAL, EVICT_FIRST, EVICT_LAST };
}
inline uint32_t cast_smem_ptr_to_uint(const void* pointer) { return sim::shared_address(pointer); }
inline void prefetch_tma_descriptor(const CUtensorMap*) {}
struct SM90_TMA_LOAD_4D {
  struct PREFETCH {
    static void copy(const CUtensorMap*, int, int, int, int) {}
  };
  static void copy(const CUtensorMap* map, uint64_t* full, uint64_t, void* to, int a, int b, int c, int d) {
    sim::load(*map, *reinterpret_cast<sim::MBarrier*>(full), static_cast<char*>(to), {a, b, c, d}, sim::self().block);
  }
};
struct SM90_TMA_LOAD_5D {
  static void copy(const CUtensorMap* map, uint64_t* full, uint64_t, void* to, int a, int b, int c, int d, int e) {
    sim::load(*map, *reinterpret_cast<sim::MBarrier*>(full), static_cast<char*>(to), {a, b, c, d, e}, sim::self().block);
  }
};
struct SM90_TMA_LOAD_MULTICAST_4D {
  static void copy(const CUtensorMap* map, uint64_t* full, uint16_t mask, uint64_t, void* to, int a, int b, int c, int d) {
    for (sim::Block* block : sim::self().block->cluster) {
      if (mask >> block->rank & 1) {
        sim::load(*map, *reinterpret_cast<sim::MBarrier*>(full), static_cast<char*>(to), {a, b, c, d}, block);
      }
    }
  }
};
inline void cluster_sync() { sim::cluster_sync(); }
struct SM90_TMA_STORE_4D {
  static void copy(const CUtensorMap* map, const void* from, int a, int b, int c, int d) {
    sim::store(*map, static_cast<const char*>(from), {a, b, c, d});
  }
};
struct SM90_TMA_STORE_5D {
  static void copy(const CUtensorMap* map, const void* from, int a, int b, int c, int d, int e) {
    sim::store(*map, static_cast<const char*>(from), {a, b, c, d, e});
  }
};
struct SM90_BULK_COPY_G2S {
  static void copy(const void* from, uint64_t* full, void* to, int bytes) {
    sim::bulk_load(from, *reinterpret_cast<sim::MBarrier*>(full), to, bytes);
  }
};
inline void tma_store_arrive() { sim::bulk_commit(); }
template <int pending>
void tma_store_wait() {
  sim::bulk_wait(pending, 1);
}

}  // namespace cute

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorLaunchFailure };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor, cudaDevAttrMultiProcessorCount };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum CUresult { CUDA_SUCCESS };
using cuuint64_t = uint64_t;
using cuuint32_t = uint32_t;
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_FLOAT32 };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_32B, CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data, const cuuint64_t* sizes,
                                       const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  constexpr int kBytes[] = {1, 2, 2, 4};
  *map = {static_cast<char*>(data), int(rank), kBytes[type], int(swizzle), {}, {}, {}};
  map->strides[0] = map->element;
  for (cuuint32_t i = 0; i < rank; ++i) {
    map->sizes[i] = sizes[i];
    map->box[i] = box[i];
    if (i > 0) {
      map->strides[i] = strides[i - 1];
    }
  }
  const bool whole = int(box[0]) * map->element <= (16 << map->swizzle_bits) || map->swizzle_bits == 0;
  return whole && reinterpret_cast<uintptr_t>(data) % 16 == 0 ? CUDA_SUCCESS : CUresult(1);
}
inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, int, cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr what, int) {
  *value = what == cudaDevAttrComputeCapabilityMajor ? 9 : what == cudaDevAttrMultiProcessorCount ? 4 : 0;
  return cudaSuccess;
}
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct { int programmaticStreamSerializationAllowed; } val;
};
struct cudaLaunchConfig_t {
  dim3 grid_dim, block_dim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  const cudaLaunchAttribute* attrs;
  int numAttrs;
};
template <class T>
cudaError_t cudaFuncSetAttribute(T, int, size_t) {
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() {
  const bool failed = sim::machine.failed;
  sim::machine.failed = false;
  return failed ? cudaErrorLaunchFailure : cudaSuccess;
}

// What may overlap the launch before it begins after its end here.
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), const Arguments&... arguments) {
  sim::launch(kernel, config->grid_dim, config->block_dim, config->dynamicSmemBytes, 1, arguments...);
  return cudaGetLastError();
}

extern "C" inline __attribute__((used)) void fagen_simulator_seed(uint64_t seed) { sim::machine.random.seed(seed); }
// Whether launches are noted, and nothing runs.
extern "C" inline __attribute__((used)) void fagen_simulator_notes(int on) { sim::machine.notes = on; }
// The grids of all launches since the last time it was asked, a line each.
extern "C" inline __attribute__((used)) const char* fagen_simulator_noted() {
  static std::string said;
  said = std::exchange(sim::machine.noted, "");
  return said.c_str();
}
// Why the last call failed.
extern "C" inline __attribute__((used)) const char* fagen_simulator_said() { return sim::machine.said.c_str(); }
