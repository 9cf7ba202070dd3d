// How threads meet: the lanes of a warp, at named barriers, and the blocks of a cluster.
#pragma once

#include <algorithm>
#include <cstdint>

#include "threads.hpp"

namespace sim {

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
  if (self().made_barriers) {
    fail("mbarriers were initialised without a fence behind that");
  }
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

}  // namespace sim
