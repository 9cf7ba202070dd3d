// How fast a KV cache is read, by TMA: by bytes in flight, thread blocks per multiprocessor, box,
// eviction hint, layout, what L2 fetches beside; and by all threads, with cp.async or plain loads.
//
// By TMA one thread of each block issues all copies and waits for each as late as it can; nobody
// reads what has landed. A block has a run of equal length out of all (sequence, KV head, block of
// keys), K and V in turn.

#include "micro.cuh"

constexpr int kMostSlots = 96;
constexpr int kBarrierBytes =
    kKB;  // padded by the compiler, since tiles begin at a multiple of 1,024
static_assert(kMostSlots * sizeof(uint64_t) <= kBarrierBytes);
constexpr int kHeads = 8;  // of K and V

struct Work {
  int batch, blocks, slabs;  // blocks of keys of a sequence, slabs of 64 columns of a row
  int slabs_of_box, box_rows;
  int slots, box_bytes;
  bool heads_first;  // a run goes over the heads of the same keys before it goes on along the keys
  bool in_columns;   // a slab is found by its first column; else slabs are a dimension of their own
};

// Box by box through a block's run.
struct Position {
  int batch, head, block, slab = 0, value = 0;

  __device__ Position(const Work& work, int unit) {
    const int within = unit % (kHeads * work.blocks);
    batch = unit / (kHeads * work.blocks);
    head = work.heads_first ? within % kHeads : within / work.blocks;
    block = work.heads_first ? within / kHeads : within % work.blocks;
  }

  __device__ void advance(const Work& work) {
    if ((slab += work.slabs_of_box) < work.slabs) {
      return;
    }
    slab = 0;
    if ((value ^= 1)) {
      return;
    }
    if (work.heads_first) {
      if (++head == kHeads) {
        head = 0, ++block;
      }
      if (block == work.blocks) {
        block = 0, ++batch;
      }
    } else {
      if (++block == work.blocks) {
        block = 0, ++head;
      }
      if (head == kHeads) {
        head = 0, ++batch;
      }
    }
  }
};

__global__ void read(const __grid_constant__ CUtensorMap map, Work work, uint64_t policy,
                     uint32_t* sink) {
  __shared__ uint64_t landed[kMostSlots];
  unsigned char* tiles = aligned_smem();
  if (threadIdx.x != 0) {
    return;
  }
  prefetch(&map);
  for (int slot = 0; slot < work.slots; ++slot) {
    barrier_init(&landed[slot], 1);
  }
  barriers_visible();
  const int64_t units = int64_t(work.batch) * kHeads * work.blocks;
  const int first = int(units * blockIdx.x / gridDim.x),
            last = int(units * (blockIdx.x + 1) / gridDim.x);
  const int boxes = (last - first) * 2 * (work.slabs / work.slabs_of_box);
  Position at(work, first);
  int slot = 0, parity = 0;
  for (int box = 0; box < boxes + work.slots; ++box) {
    if (box >= work.slots) {
      wait(&landed[slot], parity ^ 1);
    }
    if (box < boxes) {
      expect_bytes(&landed[slot], work.box_bytes);
      load_box(tiles + slot * work.box_bytes, &map, &landed[slot], policy,
               work.in_columns ? 64 * at.slab : 0, at.block * work.box_rows,
               work.in_columns ? 0 : at.slab, at.head, 2 * at.batch + at.value);
      at.advance(work);
    }
    if (++slot == work.slots) {
      slot = 0;
      parity ^= 1;
    }
  }
  sink[blockIdx.x] = *reinterpret_cast<volatile uint32_t*>(tiles);
}

// Where rows lie, in bytes.
struct Layout {
  int64_t of_key, of_head, of_tensor;

  __device__ const unsigned char* tile(const unsigned char* cache, const Position& at,
                                       int rows) const {
    return cache + (2 * at.batch + at.value) * of_tensor + at.head * of_head +
           int64_t(at.block) * rows * of_key;
  }
};

constexpr int kReaders = 256;                          // threads
constexpr int kTileBytes = 16 * kKB;                   // of K or V, that all of them read together
constexpr int kParts = kTileBytes / 16 / kReaders;     // of 16 bytes, of each

// Where a thread's part of a tile lies; parts of a row are neighbours.
__device__ int64_t offset_of(int part, int row_bytes, const Layout& layout) {
  const int parts_of_row = row_bytes / 16, index = part * kReaders + int(threadIdx.x);
  return index / parts_of_row * layout.of_key + index % parts_of_row * 16;
}

// The same run by plain loads, so many tiles of a block at a time.
template <int kTiles>
__global__ void __launch_bounds__(kReaders)
    load(const unsigned char* cache, Work work, Layout layout, uint32_t* sink) {
  const int64_t units = int64_t(work.batch) * kHeads * work.blocks;
  const int first = int(units * blockIdx.x / gridDim.x),
            last = int(units * (blockIdx.x + 1) / gridDim.x);
  Position at(work, first);
  uint32_t seen = 0;
  for (int tiles = (last - first) * 2; tiles > 0; tiles -= kTiles) {
    uint4 got[kTiles][kParts] = {};
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile < tiles) {
        const unsigned char* const base = layout.tile(cache, at, work.box_rows);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const auto* from =
              reinterpret_cast<const uint4*>(base + offset_of(part, work.slabs * 128, layout));
          asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(got[tile][part].x), "=r"(got[tile][part].y), "=r"(got[tile][part].z),
                         "=r"(got[tile][part].w)
                       : "l"(from));
        }
        at.advance(work);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const uint4 x = got[tile][part];
        seen ^= x.x ^ x.y ^ x.z ^ x.w;
      }
    }
  }
  if (seen == 0x12345678) {
    *sink = seen;  // which nobody knows beforehand
  }
}

// The same by cp.async, so many tiles of a block on their way.
template <int kTiles>
__global__ void __launch_bounds__(kReaders)
    copy(const unsigned char* cache, Work work, Layout layout, uint32_t* sink) {
  unsigned char* const tiles = aligned_smem();
  const int64_t units = int64_t(work.batch) * kHeads * work.blocks;
  const int first = int(units * blockIdx.x / gridDim.x),
            last = int(units * (blockIdx.x + 1) / gridDim.x);
  Position at(work, first);
  const int all = (last - first) * 2;
  for (int tile = 0; tile < all; ++tile) {
    const unsigned char* const base = layout.tile(cache, at, work.box_rows);
    const uint32_t to = smem_address(tiles + tile % kTiles * kTileBytes) + threadIdx.x * 16;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(
                       to + part * kReaders * 16),
                   "l"(base + offset_of(part, work.slabs * 128, layout)));
    }
    asm volatile("cp.async.commit_group;");
    asm volatile("cp.async.wait_group %0;" ::"n"(kTiles - 1) : "memory");
    at.advance(work);
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  sink[blockIdx.x] = *reinterpret_cast<volatile uint32_t*>(tiles);
}

__global__ void fill(uint4* words, size_t count) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count;
       i += size_t(gridDim.x) * blockDim.x) {
    const uint32_t x = uint32_t(i) * 2654435761u;  // not zeros: those cost less power
    words[i] = {x, x ^ x >> 15, x * 2246822519u, x ^ x << 13};
  }
}

enum class By { tma, loads, copies };

struct Case {
  double mb;  // of 10^6 bytes
  int in_flight_kb, blocks, box_kb;
  int head_dim = 128;
  bool hnd = false, evict_first = true, heads_first = false;
  int promoted = 256;  // bytes that L2 fetches for each 32 of a box; 0: no more than it asks for
  By by = By::tma;

  std::string name() const {
    const std::string how = by == By::loads    ? "plain loads"
                            : by == By::copies ? "cp.async"
                                               : "boxes of " + std::to_string(box_kb) + " KB";
    return std::to_string(int(mb)) + " MB, hd" + std::to_string(head_dim) +
           (hnd ? " HND, " : " NHD, ") + std::to_string(in_flight_kb) + " KB in flight in " +
           std::to_string(blocks) + " block(s), " + how + (evict_first ? "" : ", no EVICT_FIRST") +
           (heads_first ? ", heads first" : "") +
           (promoted == 256 ? "" : ", L2 promotion " + std::to_string(promoted));
  }
};

using Reader = void (*)(const unsigned char*, Work, Layout, uint32_t*);

// The kernel that has so many tiles of a block on their way.
Reader reader(By by, int tiles) {
  switch (tiles) {
    case 1:
      return by == By::loads ? load<1> : copy<1>;
    case 2:
      return by == By::loads ? load<2> : copy<2>;
    case 3:
      return by == By::loads ? load<3> : copy<3>;
    case 4:
      return by == By::loads ? load<4> : copy<4>;
    case 6:
      return copy<6>;
  }
  throw Failure("no kernel has so many tiles on their way");
}

constexpr size_t kBytes = size_t(1) << 30;  // rotated over: more than 20 times the L2 cache
constexpr double kShort = 33.554432, kLong = 536.870912;
constexpr double kShort96 = 33.42336, kLong96 = 16 * kShort96;  // whole sequences of hd96

double rate(const Case& one, unsigned char* memory, uint32_t* sink, int sms) {
  const bool in_columns = one.head_dim % 64;  // the last slab is partly beyond a row
  const int slabs = (one.head_dim + 63) / 64, slabs_of_box = one.box_kb == 16 ? slabs : 1;
  const int box_rows = one.box_kb * kKB / (128 * slabs_of_box);
  const uint64_t row = 2 * one.head_dim,
                 keys = 8192 * 128 / one.head_dim / 64 * 64;  // a sequence: about 33.6 MB
  const uint64_t tensor = kHeads * keys * row, bytes = uint64_t(one.mb * 1e6 + 0.5);
  const uint64_t of_key = one.hnd ? row : kHeads * row, of_head = one.hnd ? keys * row : row;
  const uint64_t columns = in_columns ? one.head_dim : 64, planes = in_columns ? 1 : slabs;
  std::vector<CUtensorMap> maps;
  for (size_t offset = 0; offset + bytes <= kBytes; offset += bytes) {
    maps.push_back(tensor_map(memory + offset, {columns, keys, planes, kHeads, bytes / tensor},
                              {of_key, 128, of_head, tensor},
                              {64, uint32_t(box_rows), uint32_t(slabs_of_box), 1, 1}, true,
                              one.promoted == 256   ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B
                              : one.promoted == 128 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                                    : CU_TENSOR_MAP_L2_PROMOTION_NONE));
  }
  const Work work = {int(bytes / tensor / 2),
                     int(keys / box_rows),
                     slabs,
                     slabs_of_box,
                     box_rows,
                     one.in_flight_kb / one.blocks / one.box_kb,
                     one.box_kb * kKB,
                     one.heads_first,
                     in_columns};
  // all of a multiprocessor's share, so that no more blocks are resident than meant
  const int smem = 228 * kKB / one.blocks - kKB - kBarrierBytes;
  const int launches = std::max<int>(maps.size(), 4), most = 227 * kKB - kBarrierBytes;
  const Launch how = {sms * one.blocks, one.by == By::tma ? 32 : kReaders,
                      std::min(smem / 128 * 128, most)};
  double us = 0;
  if (one.by == By::tma) {
    prepare(read, how);
    us = graph_us([&] {
      for (int i = 0; i < launches; ++i) {
        launch(read, how, maps[i % maps.size()], work, one.evict_first ? kEvictFirst : kEvictNormal,
               sink);
      }
    });
  } else {
    const Reader kernel = reader(one.by, one.in_flight_kb * kKB / one.blocks / kTileBytes);
    const Layout layout = {int64_t(of_key), int64_t(of_head), int64_t(tensor)};
    prepare(kernel, how);
    us = graph_us([&] {
      for (int i = 0; i < launches; ++i) {
        const unsigned char* const cache = memory + i % maps.size() * bytes;
        launch(kernel, how, cache, work, layout, sink);
      }
    });
  }
  return bytes / (us / launches) / 1e3;
}

int main(int argc, char** argv) {
  return measured(argc, argv, [](Rows& rows) {
    std::vector<Case> cases;
    for (const double mb : {kLong, kShort}) {
      for (const int in_flight : {16, 32, 48, 64, 96, 128, 160, 192}) {
        for (const int blocks : {1, 2, 3, 4}) {
          if (in_flight % (8 * blocks) == 0) {
            cases.push_back({mb, in_flight, blocks, 8});
          }
        }
      }
      for (const int box : {2, 16}) {
        for (const int in_flight : {32, 64, 128, 192}) {
          cases.push_back({mb, in_flight, 2, box});
        }
      }
      for (const int head_dim : {64, 128}) {
        for (const bool hnd : {false, true}) {
          for (const bool evict_first : {true, false}) {
            if (head_dim == 64 || hnd || !evict_first) {  // the rest stands above
              cases.push_back({mb, 192, 3, 8, head_dim, hnd, evict_first});
            }
          }
        }
        cases.push_back({mb, 192, 3, 8, head_dim, false, true, true});
      }
      for (const int in_flight : {80, 112, 144, 176}) {  // odd numbers of boxes in a block
        cases.push_back({mb, in_flight, 2, 8});
      }
      for (const int promoted : {0, 128}) {
        cases.push_back({mb, 192, 2, 8, 128, false, true, false, promoted});
        cases.push_back({mb, 48, 2, 8, 128, false, true, false, promoted});
        for (const bool heads_first : {false, true}) {  // a row of hd64 is half of what L2 fetches
          cases.push_back({mb, 192, 3, 8, 64, false, true, heads_first, promoted});
        }
      }
      for (const int promoted : {0, 128, 256}) {  // every second row of hd96 begins within a line
        for (const bool heads_first : {false, true}) {
          const double mb96 = mb == kLong ? kLong96 : kShort96;
          cases.push_back({mb96, 192, 2, 8, 96, false, true, heads_first, promoted});
        }
      }
      for (const bool hnd : {false, true}) {
        for (const int blocks : {2, 4}) {
          for (const int tiles : {1, 2, 3, 4, 6}) {
            if (tiles < 6 && tiles * blocks <= 12) {
              cases.push_back({mb, 16 * tiles * blocks, blocks, 16, 128, hnd, true, false, 256,
                               By::loads});
            }
            if (tiles * blocks <= 12) {
              cases.push_back({mb, 16 * tiles * blocks, blocks, 16, 128, hnd, true, false, 256,
                               By::copies});
            }
          }
        }
      }
    }
    auto* memory = allocated<unsigned char>(kBytes);
    auto* sink = allocated<uint32_t>(4096);
    const int sms = sm_count();
    fill<<<sms * 8, 256, 0, stream()>>>(reinterpret_cast<uint4*>(memory), kBytes / sizeof(uint4));
    ok(cudaStreamSynchronize(stream()), "filling the buffers");
    for (const Case& one : cases) {
      rows.row(
          one.name(), "GB/s", [&] { return rate(one, memory, sink, sms); },
          field("mb", one.mb) + field("in_flight_kb", one.in_flight_kb) +
              field("blocks", one.blocks) + field("box_kb", one.box_kb) +
              field("head_dim", one.head_dim));
    }
  });
}
