// How soon a thread block has its first copy under way if it finds its own work: one warp scans the
// lengths of all sequences, cuts their blocks of keys into equal runs, one for each thread block,
// and copies the first box of its own.
//
// Lengths come from L2, where the kernel before has written them; keys come from DRAM.

#include "micro.cuh"

constexpr int kHeads = 8, kBlock = 64, kKeys = 4096,
              kSequences = 32;  // sequences that have keys of their own
constexpr int kBoxBytes = 64 * kBlock * 2;

struct First {
  int sequence, head, block;
};

struct Record {
  First first;
  int issued, landed;  // clocks since the thread block's start
};

__device__ __forceinline__ int blocks_of(int length) {
  return (length + kBlock - 1) / kBlock;
}

// Where a run begins if so many blocks are cut into runs that differ by one at most.
__host__ __device__ inline int begin_of(int total, int run, int runs) {
  const int rest = total % runs;
  return total / runs * run + (run < rest ? run : rest);
}

// The first block of keys of this thread block's run; every lane has it.
template <int kLengths>
__device__ __forceinline__ First find(const int* lengths) {
  constexpr int kOfLane = kLengths / 32;
  const int lane = threadIdx.x;
  int blocks[kOfLane], sum = 0;
  if constexpr (kOfLane == 1) {
    blocks[0] = blocks_of(lengths[lane]);
    sum = kHeads * blocks[0];
  } else {
#pragma unroll
    for (int i = 0; i < kOfLane; i += 4) {
      const int4 four = reinterpret_cast<const int4*>(lengths)[(lane * kOfLane + i) / 4];
      blocks[i] = blocks_of(four.x), blocks[i + 1] = blocks_of(four.y);
      blocks[i + 2] = blocks_of(four.z), blocks[i + 3] = blocks_of(four.w);
      sum += kHeads * (blocks[i] + blocks[i + 1] + blocks[i + 2] + blocks[i + 3]);
    }
  }
  int through = sum;  // all lanes up to this one
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(~0u, through, step);
    through += lane >= step ? below : 0;
  }
  const int total = __shfl_sync(~0u, through, 31);
  const int mine = begin_of(total, blockIdx.x, gridDim.x);
  const int owner = min(31, __popc(__ballot_sync(~0u, through <= mine)));
  // only the owner's search finds something: the others' come for nothing
  int before = through - sum, sequence = 0;
#pragma unroll
  for (int i = 0; i < kOfLane - 1; ++i) {
    const int next = before + kHeads * blocks[i];
    const bool further = next <= mine && sequence == i;
    before = further ? next : before;
    sequence += further;
  }
  int of_sequence = blocks[0];
#pragma unroll
  for (int i = 1; i < kOfLane; ++i) {
    of_sequence = sequence == i ? blocks[i] : of_sequence;
  }
  before = __shfl_sync(~0u, before, owner);
  sequence = __shfl_sync(~0u, sequence, owner) + owner * kOfLane;
  of_sequence = __shfl_sync(~0u, of_sequence, owner);
  const int head = (mine - before) / of_sequence;
  return {sequence, head, mine - before - head * of_sequence};
}

template <int kLengths>
__global__ void __launch_bounds__(160)
    first_copy(const __grid_constant__ CUtensorMap map, const int* lengths, Record* records) {
  const long long began = clock64();
  __shared__ uint64_t landed;
  unsigned char* tile = aligned_smem();
  if (threadIdx.x >= 32) {
    return;
  }
  if (threadIdx.x == 0) {
    prefetch(&map);
    barrier_init(&landed, 1);
    barriers_visible();
  }
  First first = {0, int(blockIdx.x % kHeads),
                 int(blockIdx.x / kHeads)};  // as the host would have said
  if constexpr (kLengths > 0) {
    first = find<kLengths>(lengths);
  }
  if (threadIdx.x == 0) {
    expect_bytes(&landed, kBoxBytes);
    load_box(tile, &map, &landed, kEvictFirst, 0, first.block * kBlock, 0, first.head,
             first.sequence % kSequences);
    const long long issued = clock64();
    wait(&landed, 0);
    records[blockIdx.x] = {first, int(issued - began), int(clock64() - began)};
  }
}

__global__ void write_lengths(int* lengths, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    lengths[i] = 64 + i * 1237 % (kKeys - 63);
  }
}

// Everything else leaves L2, without a dirty line.
__global__ void sweep(const uint4* words, size_t count, uint32_t* sink) {
  uint32_t all = 0;
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count;
       i += size_t(gridDim.x) * blockDim.x) {
    all ^= words[i].x;
  }
  if (all == 0x12345678) {
    *sink = all;
  }
}

struct Memory {
  unsigned char* keys;
  uint4* other;
  int* lengths;
  Record* records;
  uint32_t* sink;
};

constexpr size_t kOther = size_t(256) << 20;

void compare(const std::vector<Record>& records, const std::vector<int>& lengths) {
  int total = 0;
  for (const int length : lengths) {
    total += kHeads * ((length + kBlock - 1) / kBlock);
  }
  for (size_t i = 0; i < records.size(); ++i) {
    int rest = begin_of(total, int(i), int(records.size())), sequence = 0, blocks;
    while (rest >= kHeads * (blocks = (lengths[sequence] + kBlock - 1) / kBlock)) {
      rest -= kHeads * blocks;
      ++sequence;
    }
    const First found = records[i].first;
    if (found.sequence != sequence || found.head != rest / blocks || found.block != rest % blocks) {
      throw Failure("wrong: thread block " + std::to_string(i) + " begins in sequence " +
                    std::to_string(found.sequence) + " instead of " + std::to_string(sequence));
    }
  }
}

template <int kLengths>
double us(const Memory& memory, int Record::* when) {
  const uint64_t row = 64 * 2 * 2;
  const CUtensorMap map =
      tensor_map(memory.keys, {64, kKeys, 2, kHeads, kSequences},
                 {kHeads * row, 128, row, kKeys * kHeads * row}, {64, kBlock, 1, 1, 1});
  const int sms = sm_count();
  const Launch how = {sms, 160, 75 * kKB};
  prepare(first_copy<kLengths>, how);
  std::vector<double> clocks;
  for (int round = 0; round < 20; ++round) {
    sweep<<<sms * 8, 256, 0, stream()>>>(memory.other, kOther / sizeof(uint4), memory.sink);
    write_lengths<<<1, 1024, 0, stream()>>>(memory.lengths, kLengths);
    launch(first_copy<kLengths>, how, map, memory.lengths, memory.records);
    ok(cudaStreamSynchronize(stream()), "a kernel");
    const std::vector<Record> records = fetched(memory.records, sms);
    if (kLengths > 0) {
      compare(records, fetched(memory.lengths, kLengths));
    }
    for (const Record& record : records) {
      clocks.push_back(record.*when);
    }
  }
  return median(clocks) / clocks_per_us();
}

template <int kLengths>
void scanned(Rows& rows, const Memory& memory) {
  const std::string what =
      kLengths > 0 ? std::to_string(kLengths) + " lengths scanned" : "no lengths";
  rows.row(what + ", first copy issued", "us",
           [&] { return us<kLengths>(memory, &Record::issued); });
  rows.row(what + ", first copy landed", "us",
           [&] { return us<kLengths>(memory, &Record::landed); });
}

int main(int argc, char** argv) {
  return measured(argc, argv, [](Rows& rows) {
    const size_t keys = size_t(kSequences) * kKeys * kHeads * 256;
    const Memory memory = {allocated<unsigned char>(keys), allocated<uint4>(kOther / sizeof(uint4)),
                           allocated<int>(1024), allocated<Record>(256), allocated<uint32_t>(1)};
    ok(cudaDeviceSynchronize(), "clearing");
    scanned<0>(rows, memory);
    scanned<32>(rows, memory);
    scanned<256>(rows, memory);
    scanned<1024>(rows, memory);
  });
}
