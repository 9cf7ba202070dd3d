// What a kernel of combining calls beyond simt.h: shuffles, votes, and copies that arrive when they are waited for.

#pragma once
#include "simt.h"

#include <deque>
#include <utility>

namespace simt {

struct Copy {
  uint4* to;
  const void* from;
};

inline std::deque<std::vector<Copy>> groups[1024];  // of each thread; the last one is open

inline void copy_async(uint4& to, const void* from) {
  if (groups[thread()].empty()) {
    groups[thread()].emplace_back();
  }
  groups[thread()].back().push_back({&to, from});
}

inline void close_group() {
  if (groups[thread()].empty()) {
    groups[thread()].emplace_back();
  }
  groups[thread()].emplace_back();
}

// All closed groups but the last `pending` have arrived, and not one more.
inline void wait_group(size_t pending) {
  auto& own = groups[thread()];
  while (own.size() > pending + 1) {
    for (const Copy& copy : own.front()) {
      std::memcpy(copy.to, copy.from, sizeof(uint4));
    }
    own.pop_front();
  }
}

// What a lane of a warp has, for all.
inline uint32_t word_of(uint32_t word, int lane) {
  words[thread()][0] = word;
  meet_warp();
  const uint32_t found = words[thread() / 32 * 32 + lane][0];
  meet_warp();
  return found;
}

template <typename T>
T shuffle(T value, int lane, int width, bool up) {
  const int own = thread() % 32, first = own / width * width;
  const int from = !up ? first + lane % width : own - lane >= first ? own - lane : own;
  uint32_t word;
  std::memcpy(&word, &value, sizeof(word));
  word = word_of(word, from);
  std::memcpy(&value, &word, sizeof(word));
  return value;
}

inline uint32_t ballot(bool vote) {
  words[thread()][0] = vote;
  meet_warp();
  uint32_t votes = 0;
  for (int lane = 0; lane < 32; ++lane) {
    votes |= words[thread() / 32 * 32 + lane][0] << lane;
  }
  meet_warp();
  return votes;
}

}  // namespace simt

template <typename T>
T __shfl_up_sync(unsigned, T value, int delta, int width) {
  return simt::shuffle(value, delta, width, true);
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  return simt::shuffle(value, lane, width, false);
}
#define __ballot_sync(mask, vote) simt::ballot(vote)

template <typename T>
T __ldcg(const T* from) { return *from; }
template <typename T>
void __stcg(T* to, T value) { *to = value; }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }
