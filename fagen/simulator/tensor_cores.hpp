// wgmma: products that are under way until somebody waits for them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>

#include "memory.hpp"

namespace sim {

enum class Number { kHalf, kBfloat, kE4m3 };

inline float number(Number type, const char* from) {
  if (type == Number::kE4m3) {
    return of_e4m3(uint8_t(*from));
  }
  uint16_t raw;
  std::memcpy(&raw, from, 2);
  return type == Number::kHalf ? of_half(raw) : of_bfloat(raw);
}

// mma.m16n8k16: lane 4 g + q holds of a rows g and g + 8, columns 2 q, 2 q + 1 and those eight further on, of b these
// rows of column g, of d columns 2 q and 2 q + 1 of its two rows.
inline void mma(Number type, std::array<float*, 4> d, std::array<uint32_t, 4> a, std::array<uint32_t, 2> b, float c) {
  const auto pair = [](uint32_t low, uint32_t high) { return uint64_t(high) << 32 | low; };
  const auto* shown = meet(pair(a[0], a[1]), pair(a[2], a[3]), pair(b[0], b[1]));
  const auto element = [&](int lane, int word, int half) {
    const uint16_t bits = shown[lane][word / 2] >> (word % 2 * 32 + half * 16);
    return number(type, reinterpret_cast<const char*>(&bits));
  };
  for (int i = 0; i < 4; ++i) {
    const int row = lane() / 4 + i / 2 * 8, column = lane() % 4 * 2 + i % 2;
    float sum = c;
    for (int k = 0; k < 16; ++k) {
      sum += element(row % 8 * 4 + k % 8 / 2, k / 8 * 2 + row / 8, k % 2) * element(column * 4 + k % 8 / 2, 4 + k / 8, k % 2);
    }
    *d[i] = sum;
  }
  meet();
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
  if (!w.fenced) {
    fail("a product of wgmma has no fence before it");
  }
  if (lane() == 0) {
    auto all = std::make_shared<Collected>();
    for (int i = 0; i < kWarp; ++i) {
      all->c[i] = *reinterpret_cast<const std::array<float*, n / 2>*>(shown[i][0]);
      all->a[i] = *reinterpret_cast<const std::array<uint32_t, 4>*>(shown[i][1]);
    }
    Block* const block = self().block;
    const int first_row = self().index / kWarp % 4 * 16;
    w.products.emplace_back(w.groups, [=] {
      const char* const shared = published(*block);
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

// Before the products of each group, which may take what was written to registers since the last.
inline void wgmma_fence() {
  meet();
  warp().fenced = true;
}

inline void wgmma_commit() {
  meet();
  if (lane() == 0) {
    ++warp().groups;
    warp().fenced = false;
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

}  // namespace sim
