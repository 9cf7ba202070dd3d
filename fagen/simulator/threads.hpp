// Threads of a grid as fibers, and what is asynchronous beside them.
//
// When what is asynchronous happens is drawn by chance from a seed.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "numbers.hpp"

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
  const Block* block = nullptr;
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
  uint64_t resumes = 0;        // as a warp does: lanes lose each other
  bool made_barriers = false;  // that nobody else is to know of before a fence
  const uint32_t* watched = nullptr;  // global memory that it last looked at, and what it saw there
  uint32_t seen = 0;
  std::deque<std::vector<std::function<void()>>> copies{1};  // by groups, oldest first; the last one is open
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
  bool fenced = false;                                // what products take in registers is there
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
  char* published;      // the same as wgmma and TMA see it: what threads wrote, once there was a fence
  bool fenced = false;  // since it was brought up to date
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  NamedBarrier barriers[17];  // the last of them is the cluster's
  int living = 0;
};

// The shared memory that wgmma and TMA read.
inline const char* published(Block& block) {
  if (std::exchange(block.fenced, false)) {
    std::memcpy(block.published, block.shared, kSharedBytes);
  }
  return block.published;
}

struct Machine {
  std::mt19937_64 random{1};
  jmp_buf scheduler;
  Thread* current = nullptr;
  dim3 grid, block;
  uint64_t turn = 0;  // of all threads
  std::vector<std::pair<uint64_t, std::function<void()>>> copies;  // that TMA makes in a turn to come
  std::vector<std::shared_ptr<BulkStore>> bulk_stores;             // likewise
  const std::function<void()>* body = nullptr;
  bool failed = false;
  std::string said;  // why
  bool notes = false;  // launches are noted, and nothing runs
  std::string noted;   // their grids
  std::vector<void*> stacks;
  std::vector<char*> memories;
  uint64_t haste = 0;  // of the seed: see begin

  // One seed of four has copies and products happen now and then, one copies very late and products at once, one the
  // other way round, one both very late.
  void begin(uint64_t seed) {
    random.seed(seed);
    haste = seed % 4;
  }

  // Whether a product that is under way happens in this turn.
  bool multiplies() {
    constexpr int kTurns[] = {3, 1, 1 << 20, 1 << 20};
    return chance(kTurns[haste]);
  }

  bool chance(int one_in) { return random() % one_in == 0; }

  // How many turns a warp falls behind: often none, now and then very many.
  uint64_t pause() {
    constexpr uint64_t kMost[] = {1, 4, 30, 300};
    return random() % kMost[random() % 4];
  }

  // How many turns a copy takes.
  uint64_t delay() {
    constexpr uint64_t kLate[] = {0, 100, 1000, 10000};
    return haste == 0 ? pause() : haste == 2 ? 0 : kLate[random() % 4];
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
  const bool late = self().resumes > machine.turn || machine.chance(8);  // others may go first
  if (late || !wait.test(wait.object, wait.value)) {
    self().wait = wait;
    give_way();
  }
  self().watched = nullptr;
}

// ---- What is asynchronous ------------------------------------------------------------------

inline void happen(Warp& warp) {
  auto product = std::move(warp.products.front().second);
  warp.products.pop_front();
  product();
}

// Lets happen what is due; returns whether anything did.
inline bool something_happens() {
  Machine& m = machine;
  bool any = false;
  for (size_t i = 0; i < m.copies.size();) {
    if (m.copies[i].first > m.turn) {
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
    if (store.due > m.turn) {
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

// ---- Running a grid ------------------------------------------------------------------------

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

// The shared memory of a block that has ended is another's.
inline void end(const Block& block) {
  Machine& m = machine;
  for (const auto& store : m.bulk_stores) {
    if (store->block == &block && store->done == 0) {
      m.failed = true;
      m.said = told(block.index) + ": it ended before what it copies from shared memory was read";
    }
  }
  for (const Thread& thread : block.threads) {
    m.stacks.push_back(thread.stack);
  }
  m.memories.push_back(block.shared);
  m.memories.push_back(block.published);
}

inline std::unique_ptr<Block> new_block(unsigned flat, int threads) {
  auto block = std::make_unique<Block>();
  const dim3& grid = machine.grid;
  block->index = {flat % grid.x, flat / grid.x % grid.y, flat / grid.x / grid.y};
  block->shared = new_memory();
  block->published = new_memory();
  block->threads.resize(threads);
  block->warps.resize((threads + kWarp - 1) / kWarp);
  block->living = threads;
  for (int i = 0; i < threads; ++i) {
    Thread& thread = block->threads[i];
    thread.block = block.get();
    thread.index = i;
    ++block->warps[i / kWarp].living;
    block->warps[i / kWarp].resumes = machine.turn + machine.pause();
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

// Skips turns until something happens, or who has fallen behind goes on; returns whether that ever is.
inline bool skip_to_next(const std::vector<std::unique_ptr<Block>>& blocks) {
  Machine& m = machine;
  uint64_t next = UINT64_MAX;
  const auto consider = [&](uint64_t turn) { next = turn > m.turn ? std::min(next, turn) : next; };
  for (const auto& copy : m.copies) {
    consider(copy.first);
  }
  for (const auto& store : m.bulk_stores) {
    consider(store->due);
  }
  for (const auto& block : blocks) {
    for (const Thread& thread : block->threads) {
      const bool goes_on = !thread.wait.test || thread.wait.test(thread.wait.object, thread.wait.value);
      if (!thread.ended && goes_on) {
        consider(std::max(thread.resumes, block->warps[thread.index / kWarp].resumes));
      }
    }
  }
  m.turn = next == UINT64_MAX ? m.turn : next - 1;
  return next != UINT64_MAX;
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
        if (thread.ended || std::max(warp.resumes, thread.resumes) > m.turn || (thread.wait.test && !thread.wait.test(thread.wait.object, thread.wait.value))) {
          continue;
        }
        progress = true;
        thread.wait = {};
        go_on(thread);
      }
      for (Warp& warp : block->warps) {
        while (!warp.products.empty() && m.multiplies()) {
          happen(warp);
        }
        if (m.turn > warp.resumes && m.chance(30)) {
          warp.resumes = m.turn + m.pause();
        }
      }
    }
    progress |= something_happens();
    if (!progress && !skip_to_next(running)) {
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
        end(*running[i + rank]);
      }
      running.erase(running.begin() + i, running.begin() + i + together.size());
    }
  }
  while (!m.failed && skip_to_next({})) {
    ++m.turn;
    something_happens();
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

}  // namespace sim
