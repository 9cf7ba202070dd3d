// Shared memory as threads and as TMA see it: mbarriers, tensor maps, copies, matrices of a warp.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "meeting.hpp"

namespace sim {

// ---- Shared memory -------------------------------------------------------------------------

constexpr int kRankShift = 24;  // addresses of a cluster: which block, and the byte in its memory

constexpr uint32_t kStatic = 1u << 31;  // an address of what is declared, in bytes from `origin`
alignas(1024) inline char origin;

inline uint32_t shared_address(const void* pointer) {
  for (const Block* block : self().block->cluster) {
    const auto offset = static_cast<const char*>(pointer) - block->shared;
    if (offset >= 0 && offset < int64_t(kSharedBytes)) {
      return block == self().block ? uint32_t(offset) : uint32_t(offset) | uint32_t(block->rank + 1) << kRankShift;
    }
  }
  return kStatic | uint32_t(static_cast<const char*>(pointer) - &origin);
}

inline uint32_t offset_of(uint32_t address) { return address % (1u << kRankShift); }

inline Block& block_of(uint32_t address) {
  Block* const own = self().block;
  const int rank = int(address >> kRankShift) - 1;
  return rank < 0 ? *own : *own->cluster[rank];
}

inline char* at(uint32_t address) {
  if (address & kStatic) {
    return &origin + (int32_t(address << 1) >> 1);
  }
  return block_of(address).shared + offset_of(address);
}

// The address in another block of the cluster of what lies at the same place.
inline uint32_t mapa(uint32_t address, int rank) { return offset_of(address) | uint32_t(rank + 1) << kRankShift; }

inline uint32_t swizzled(uint32_t address, int bits) { return address ^ (address >> 3 & ((1u << bits) - 1) << 4); }

inline bool mbarrier_passed(const void* object, uint64_t parity);

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
  void init(int count) {
    *this = {0, uint16_t(count), int16_t(count), 0};
    self().made_barriers = true;
  }
  void arrive() {
    if (pending < 1) {
      fail("more arrive at the mbarrier at byte " + std::to_string(shared_address(this)) + " than its " + std::to_string(expected));
    }
    --pending;
    settle();
  }
  void complete(int count) {
    bytes -= count;
    settle();
  }
  // Now and then a lane sees it later than the others of its warp do.
  void wait(uint32_t parity) const {
    if (machine.chance(64)) {
      self().resumes = machine.turn + 10 * machine.pause();
    }
    wait_for({mbarrier_passed, this, parity, "for the mbarrier"});
  }
};
static_assert(sizeof(MBarrier) == 8);

inline bool mbarrier_passed(const void* object, uint64_t parity) { return static_cast<const MBarrier*>(object)->phase != parity; }

// ---- Tensor maps ---------------------------------------------------------------------------

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
      const uint32_t at = swizzled(start + offset, map.swizzle_bits);
      for (char* into : {block->shared + at, block->published + at}) {
        if (address) {
          std::memcpy(into, address, map.element);
        } else {
          std::memset(into, 0, map.element);
        }
      }
    });
    full.complete(map.bytes());
  });
}

inline void enqueue(BulkStore store) {
  auto shared = std::make_shared<BulkStore>(std::move(store));
  shared->due = machine.turn + machine.delay();
  shared->block = self().block;
  self().open_stores.push_back(shared);
  machine.bulk_stores.push_back(std::move(shared));
}

inline void store(const TensorMap& map, const char* from, std::array<int, 5> to) {
  Block* const block = self().block;
  enqueue({[map, from, block] {
             std::vector<char> data(map.bytes());
             const uint32_t start = from - block->shared;
             for (uint32_t i = 0; i < data.size(); i += map.element) {
               std::memcpy(&data[i], published(*block) + swizzled(start + i, map.swizzle_bits), map.element);
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

// What is copied to shared memory is there for all.
inline void place(Block& block, uint32_t at, const void* from, int bytes) {
  std::memcpy(block.shared + at, from, bytes);
  std::memcpy(block.published + at, from, bytes);
}

inline void bulk_load(const void* from, MBarrier& full, void* to, int bytes) {
  Block* const block = self().block;
  const uint32_t offset = static_cast<char*>(to) - block->shared;
  machine.copies.emplace_back(machine.turn + machine.delay(), [=, &full] {
    place(*block, offset, from, bytes);
    full.complete(bytes);
  });
}

inline void copy_to_peer(uint32_t to, uint32_t from, int bytes, uint32_t full) {
  MBarrier& barrier = *reinterpret_cast<MBarrier*>(at(full));
  machine.copies.emplace_back(machine.turn + machine.delay(), [=, &barrier, &own = *self().block, &peer = block_of(to)] {
    place(peer, offset_of(to), published(own) + offset_of(from), bytes);
    barrier.complete(bytes);
  });
}

// A copy of shared memory as it is some time after this.
inline std::function<std::vector<char>()> reading(uint32_t from, int bytes) {
  return [=, block = self().block] {
    const char* const source = published(*block) + offset_of(from);
    return std::vector<char>(source, source + bytes);
  };
}

inline void bulk_add(void* to, uint32_t from, int bytes) {
  enqueue({reading(from, bytes), [=](const std::vector<char>& data) {
             for (int i = 0; i < bytes / 4; ++i) {
               static_cast<float*>(to)[i] += reinterpret_cast<const float*>(data.data())[i];
             }
           }});
}

inline void bulk_store(void* to, uint32_t from, int bytes) {
  enqueue({reading(from, bytes), [=](const std::vector<char>& data) { std::memcpy(to, data.data(), bytes); }});
}

inline void bulk_commit() {
  self().stores.push_back(std::move(self().open_stores));
  self().open_stores.clear();
}

// A copy by a thread itself, to its own eyes: it is there once the thread has waited for its group.
inline void copy_async(uint32_t to, const void* from, int bytes) {
  self().copies.back().emplace_back([=, into = at(to)] { std::memcpy(into, from, bytes); });
}

inline void copies_commit() { self().copies.emplace_back(); }

inline void copies_wait(size_t pending) {
  auto& copies = self().copies;
  for (; copies.size() > pending + 1; copies.pop_front()) {
    for (const auto& copy : copies.front()) {
      copy();
    }
  }
}

// Waits until all but the newest `pending` groups have been read, or (done = 2) written.
inline void bulk_wait(size_t pending, int done) {
  self().resumes = machine.turn + machine.pause();  // others go on meanwhile
  wait_for({[](const void*, uint64_t) { return true; }, nullptr, 0, "for copies"});
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

// ---- Global memory -------------------------------------------------------------------------

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

// ---- Matrices of a warp --------------------------------------------------------------------

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
