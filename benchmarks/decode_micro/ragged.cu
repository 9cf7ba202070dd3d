// Tensor maps of sequences without padding, and of pages: is what arrives, and what is stored,
// right at odd lengths and offsets, and is it as fast as through a plain map?
//
// A ragged map has 2^30 rows, and a tile at row r of a sequence of `length` rows is asked for at
// 2^30 - length + r, so that rows past the end of the sequence are out of bounds. Further
// dimensions bring the address back: for loads two, with strides 2^34 - s and s of a row of s bytes
// and coordinates 2^30 and offset + length, which wraps around 2^64; for stores one of stride s, at
// offset + length, on a base that lies 2^30 rows too low.

#include "micro.cuh"

constexpr int kRows = 64, kHeads = 8, kDepth = 128;  // a tile's rows; heads and columns of tensors
constexpr int kTile = kRows * 128;                   // bytes: 64 columns
constexpr uint64_t row_bytes(int heads) {
  return heads * kDepth * 2;  // NHD
}
constexpr uint64_t kRowBytes = row_bytes(kHeads);
constexpr int kFar = 1 << 30;
constexpr uint64_t kMany = 0x7FFF0000;  // extent of a dimension that is there for its stride

struct At {
  int x[5];
};

// The element of a 128-byte row in a tile with a 128-byte swizzle.
__host__ __device__ inline int swizzled(int row, int column) {
  return row * 64 + ((column / 8 ^ row % 8) * 8 | column % 8);
}

__host__ __device__ inline uint16_t pattern(uint32_t i) {
  return uint16_t(i * 2654435761u >> 13) | 1;
}

__device__ __forceinline__ void store_box(const CUtensorMap* map, const void* tile, const At& at) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(smem_address(tile)), "r"(at.x[0]), "r"(at.x[1]), "r"(at.x[2]), "r"(at.x[3])
      : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

template <int kRank>
__device__ __forceinline__ void load(void* tile, const CUtensorMap* map, uint64_t* barrier,
                                     const At& at) {
  if constexpr (kRank == 5) {
    load_box(tile, map, barrier, kEvictFirst, at.x[0], at.x[1], at.x[2], at.x[3], at.x[4]);
  } else {
    load_box(tile, map, barrier, kEvictFirst, at.x[0], at.x[1], at.x[2], at.x[3]);
  }
}

// ---- right or wrong -----------------------------------------------------------------------------

// A tile to each thread block, by boxes of so many rows one below the other; written out in plain
// order.
template <int kRank>
__global__ void load_tiles(const __grid_constant__ CUtensorMap map, const At* where, int box_rows,
                           uint16_t* out) {
  __shared__ uint64_t landed;
  auto* tile = reinterpret_cast<uint16_t*>(aligned_smem());
  for (int i = threadIdx.x; i < kRows * 64; i += blockDim.x) {
    tile[i] = 0xDEAD;
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  if (threadIdx.x == 0) {
    barrier_init(&landed, 1);
    barriers_visible();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    expect_bytes(&landed, kTile);
    for (int row = 0; row < kRows; row += box_rows) {
      At at = where[blockIdx.x];
      at.x[2] += row;
      load<kRank>(tile + row * 64, &map, &landed, at);
    }
  }
  wait(&landed, 0);
  for (int i = threadIdx.x; i < kRows * 64; i += blockDim.x) {
    out[blockIdx.x * kRows * 64 + i] = tile[swizzled(i / 64, i % 64)];
  }
}

__global__ void store_tiles(const __grid_constant__ CUtensorMap map, const At* where) {
  auto* tile = reinterpret_cast<uint16_t*>(aligned_smem());
  for (int i = threadIdx.x; i < kRows * 64; i += blockDim.x) {
    tile[swizzled(i / 64, i % 64)] = pattern(blockIdx.x * kRows * 64 + i);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    store_box(&map, tile, where[blockIdx.x]);
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}

struct Heads {
  int all, of_box;  // of the tensor; packed into a tile, the head fastest
};

// A tile of a sequence.
struct Tile {
  int offset, length, row, head, slab;
};

std::vector<Tile> tiles(const Heads& heads) {
  std::vector<Tile> found;
  int offset = 3;
  for (const int length : {1, 63, 64, 65, 0, 130, 7, 200, 17}) {
    const int step = kRows / heads.of_box;
    for (int row = 0; row < length + step; row += step) {  // and one wholly past the end
      for (int head = 0; head < heads.all; head += heads.of_box) {
        for (int slab = 0; slab < 2; ++slab) {
          found.push_back({offset, length, row, head, slab});
        }
      }
    }
    offset += length;
  }
  return found;
}

constexpr int kTotalRows = 3 + 547 + 130;  // the sequences, and rows around them that are nobody's

std::vector<At> places(const std::vector<Tile>& tiles, bool loads) {
  std::vector<At> found;
  for (const Tile& tile : tiles) {
    const int row = kFar - tile.length + tile.row, end = tile.offset + tile.length;
    found.push_back(loads ? At{{tile.slab * 64, tile.head, row, kFar, end}}
                          : At{{tile.slab * 64, tile.head, row, end}});
  }
  return found;
}

CUtensorMap ragged_loads(void* base, const Heads& heads) {
  const uint64_t row = row_bytes(heads.all);
  return tensor_map(base, {kDepth, uint64_t(heads.all), kFar, kMany, kMany},
                    {kDepth * 2, row, (uint64_t(1) << 34) - row, row},
                    {64, uint32_t(heads.of_box), uint32_t(kRows / heads.of_box), 1, 1});
}

CUtensorMap ragged_stores(void* base, const Heads& heads) {
  const uint64_t row = row_bytes(heads.all);
  const uint64_t shifted = reinterpret_cast<uint64_t>(base) - kFar * row;
  return tensor_map(reinterpret_cast<void*>(shifted), {kDepth, uint64_t(heads.all), kFar, kMany},
                    {kDepth * 2, row, row},
                    {64, uint32_t(heads.of_box), uint32_t(kRows / heads.of_box), 1});
}

// The index in a tensor of what a tile has at (row, column), or -1 where there is nothing.
int64_t index_of(const Tile& tile, const Heads& heads, int row, int column) {
  const int head = tile.head + row % heads.of_box, of_sequence = tile.row + row / heads.of_box;
  if (head >= heads.all || of_sequence >= tile.length) {
    return -1;
  }
  return (int64_t(tile.offset + of_sequence) * heads.all + head) * kDepth + tile.slab * 64 + column;
}

// Frees itself, so that a row leaves nothing behind.
template <class T>
struct Buffer {
  explicit Buffer(size_t count) : count(count), data(allocated<T>(count)) {}
  explicit Buffer(const std::vector<T>& host) : Buffer(host.size()) { sent(data, host); }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }

  std::vector<T> back() const {
    ok(cudaDeviceSynchronize(), "a kernel");
    return fetched(data, count);
  }

  size_t count;
  T* data;
};

std::vector<uint16_t> patterns(size_t count) {
  std::vector<uint16_t> found(count);
  for (size_t i = 0; i < count; ++i) {
    found[i] = pattern(uint32_t(i));
  }
  return found;
}

template <int kRank, class Expected>
int wrongly_loaded(const CUtensorMap& map, const std::vector<At>& where, int box_rows,
                   Expected&& expected) {
  const Buffer<At> placed(where);
  const Buffer<uint16_t> out(where.size() * kRows * 64);
  const Launch how = {int(where.size()), 128, kTile + kKB};
  prepare(load_tiles<kRank>, how);
  ok(cudaDeviceSynchronize(), "clearing");
  launch(load_tiles<kRank>, how, map, placed.data, box_rows, out.data);
  const std::vector<uint16_t> found = out.back();
  int wrong = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    wrong += found[i] != expected(i / (kRows * 64), i / 64 % kRows, i % 64);
  }
  return wrong;
}

double ragged_loads_wrong(const Heads& heads) {
  const std::vector<uint16_t> source = patterns(size_t(kTotalRows) * heads.all * kDepth);
  const Buffer<uint16_t> memory(source);
  const std::vector<Tile> all = tiles(heads);
  return wrongly_loaded<5>(ragged_loads(memory.data, heads), places(all, true), kRows,
                           [&](size_t tile, int row, int column) {
                             const int64_t index = index_of(all[tile], heads, row, column);
                             return index < 0 ? uint16_t(0) : source[index];
                           });
}

double ragged_stores_wrong(const Heads& heads) {
  std::vector<uint16_t> expected(size_t(kTotalRows) * heads.all * kDepth, 0xABAB);
  const Buffer<uint16_t> memory(expected);
  const std::vector<Tile> all = tiles(heads);
  const Buffer<At> placed(places(all, false));
  const Launch how = {int(all.size()), 128, kTile + kKB};
  prepare(store_tiles, how);
  ok(cudaDeviceSynchronize(), "clearing");
  launch(store_tiles, how, ragged_stores(memory.data, heads), placed.data);
  for (size_t tile = 0; tile < all.size(); ++tile) {
    for (int i = 0; i < kRows * 64; ++i) {
      const int64_t index = index_of(all[tile], heads, i / 64, i % 64);
      if (index >= 0) {
        expected[index] = pattern(uint32_t(tile * kRows * 64 + i));
      }
    }
  }
  const std::vector<uint16_t> found = memory.back();
  int wrong = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    wrong += found[i] != expected[i];
  }
  return wrong;
}

// Three pages of so many rows, read from `page` on by boxes of box_rows.
double pages_wrong(int page_rows, int box_rows, int page) {
  constexpr int kPages = 3;
  const std::vector<uint16_t> source = patterns(size_t(kPages) * page_rows * kHeads * kDepth);
  const Buffer<uint16_t> memory(source);
  const CUtensorMap map =
      tensor_map(memory.data, {kDepth, kHeads, uint64_t(page_rows), kPages},
                 {kDepth * 2, kRowBytes, page_rows * kRowBytes}, {64, 1, uint32_t(box_rows), 1});
  const int head = 5;
  return wrongly_loaded<4>(
      map, {At{{64, head, 0, page}}}, box_rows, [&](size_t, int row, int column) {
        if (page < 0 || page >= kPages || row >= page_rows) {
          return uint16_t(0);
        }
        return source[((size_t(page) * page_rows + row) * kHeads + head) * kDepth + 64 + column];
      });
}

// ---- speed --------------------------------------------------------------------------------------

constexpr int kSequence = 4096, kSlots = 8;
constexpr size_t kStreamed = size_t(512) << 20;
constexpr int kStreamedTiles = int(kStreamed / kRowBytes / kRows);

// Boxes of this thread block: along the keys of one head, both slabs of a row.
template <bool kRagged, bool kStores>
__device__ __forceinline__ At streamed(int box) {
  const int slab = box % 2, row = box / 2 % kStreamedTiles * kRows, head = box / 2 / kStreamedTiles;
  if constexpr (!kRagged) {
    return {{slab * 64, head, row, 0}};
  }
  const int begin = row / kSequence * kSequence, end = begin + kSequence;
  return {{slab * 64, head, kFar - kSequence + row - begin, kStores ? end : kFar, end}};
}

template <bool kRagged>
__global__ void stream_loads(const __grid_constant__ CUtensorMap map, uint32_t* sink) {
  __shared__ uint64_t landed[kSlots];
  unsigned char* tiles = aligned_smem();
  if (threadIdx.x != 0) {
    return;
  }
  for (int slot = 0; slot < kSlots; ++slot) {
    barrier_init(&landed[slot], 1);
  }
  barriers_visible();
  constexpr int64_t kBoxes = int64_t(kStreamedTiles) * kHeads * 2;
  const int first = int(kBoxes * blockIdx.x / gridDim.x),
            last = int(kBoxes * (blockIdx.x + 1) / gridDim.x);
  for (int box = first; box < last + kSlots; ++box) {
    const int slot = (box - first) % kSlots, lap = (box - first) / kSlots;
    if (lap > 0 && box - kSlots < last) {
      wait(&landed[slot], (lap - 1) % 2);
    }
    if (box < last) {
      expect_bytes(&landed[slot], kTile);
      load<kRagged ? 5 : 4>(tiles + slot * kTile, &map, &landed[slot],
                            streamed<kRagged, false>(box));
    }
  }
  sink[blockIdx.x] = *reinterpret_cast<volatile uint32_t*>(tiles);
}

template <bool kRagged>
__global__ void stream_stores(const __grid_constant__ CUtensorMap map) {
  unsigned char* tiles = aligned_smem();
  for (int i = threadIdx.x; i < kSlots * kTile / 4; i += blockDim.x) {
    reinterpret_cast<uint32_t*>(tiles)[i] = i * 2654435761u;
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x != 0) {
    return;
  }
  constexpr int64_t kBoxes = int64_t(kStreamedTiles) * kHeads * 2;
  const int first = int(kBoxes * blockIdx.x / gridDim.x),
            last = int(kBoxes * (blockIdx.x + 1) / gridDim.x);
  for (int box = first; box < last; ++box) {
    store_box(&map, tiles + (box - first) % kSlots * kTile, streamed<kRagged, true>(box));
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kSlots - 1) : "memory");
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

template <class Kernel, class... More>
double streamed_rate(Kernel kernel, const CUtensorMap& map, More... more) {
  constexpr int kLaunches = 4;
  const Launch how = {3 * sm_count(), 32, kSlots * kTile + kKB};
  prepare(kernel, how);
  const double us = graph_us([&] {
    for (int i = 0; i < kLaunches; ++i) {
      launch(kernel, how, map, more...);
    }
  });
  return kStreamed / (us / kLaunches) / 1e3;
}

int main(int argc, char** argv) {
  return measured(argc, argv, [](Rows& rows) {
    for (const Heads& heads :
         {Heads{8, 1}, {8, 4}, {6, 1}, {6, 4}}) {  // 4 of 6: past the last one too
      const std::string by = " of " + std::to_string(heads.all) + " heads, " +
                             std::to_string(heads.of_box) + " to a box";
      rows.row("ragged loads" + by, "wrong", [&] { return ragged_loads_wrong(heads); });
      rows.row("ragged stores" + by, "wrong", [&] { return ragged_stores_wrong(heads); });
    }
    rows.row("page 1 of 3", "wrong", [] { return pages_wrong(64, 64, 1); });
    rows.row("page -1", "wrong", [] { return pages_wrong(64, 64, -1); });
    rows.row("page 3 of 3", "wrong", [] { return pages_wrong(64, 64, 3); });
    rows.row("page 2^31 - 1", "wrong", [] { return pages_wrong(64, 64, 0x7FFFFFFF); });
    rows.row("a page of 48 rows by a box of 64", "wrong", [] { return pages_wrong(48, 64, 1); });
    for (const int box_rows : {16, 8, 4, 2, 1}) {
      rows.row("a page of 64 rows by boxes of " + std::to_string(box_rows), "wrong",
               [&] { return pages_wrong(64, box_rows, 1); });
    }
    Buffer<unsigned char> memory(kStreamed);
    auto* sink = allocated<uint32_t>(1024);
    ok(cudaDeviceSynchronize(), "clearing");
    const auto plain = [&] {
      return tensor_map(memory.data, {kDepth, kHeads, kStreamed / kRowBytes, 1},
                        {kDepth * 2, kRowBytes, kStreamed}, {64, 1, kRows, 1});
    };
    rows.row("loads by a plain map", "GB/s",
             [&] { return streamed_rate(stream_loads<false>, plain(), sink); });
    rows.row("loads by a ragged map", "GB/s", [&] {
      return streamed_rate(stream_loads<true>, ragged_loads(memory.data, {kHeads, 1}), sink);
    });
    rows.row("stores by a plain map", "GB/s",
             [&] { return streamed_rate(stream_stores<false>, plain()); });
    rows.row("stores by a ragged map", "GB/s", [&] {
      return streamed_rate(stream_stores<true>, ragged_stores(memory.data, {kHeads, 1}));
    });
  });
}
