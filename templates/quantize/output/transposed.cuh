// Transposed rows in shared memory, kRows bytes each. Where a row's groups of 16 keys lie depends on the row, so
// that neither those who write one group of 8 rows nor those who read 8 groups of one meet in a bank.
__device__ __forceinline__ int tile_offset(int column, int group) {
  const int turn = (column / 8 % 4 * 2 + column % 2) / (8 / kWarps);
  return column * kRows + (group ^ turn) * 16;
}

// Puts a warp's 16 keys there. A pair of keys is the 16-bit element that stmatrix transposes; lanes hold them in
// the key order of P.
__device__ __forceinline__ void transpose(uint8_t* tile, const Packed (&packed)[2]) {
  const int group = threadIdx.x / 32;
  const int matrix = lane_id() / 8;
  const int row = lane_id() % 8;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    uint32_t pairs[4];
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      pairs[2 * word] = __byte_perm(packed[0][i][word], packed[1][i][word], 0x5140);
      pairs[2 * word + 1] = __byte_perm(packed[0][i][word], packed[1][i][word], 0x7362);
    }
    const int column = 32 * i + row / 2 * 8 + 2 * matrix + row % 2;
    const uint32_t at = uint32_t(__cvta_generic_to_shared(tile + tile_offset(column, group)));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], { %1, %2, %3, %4 };" ::"r"(at), "r"(pairs[0]),
                 "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                 : "memory");
  }
}

// Writes a thread block's keys, `first` and those after it, up to the next multiple of 16.
__device__ __forceinline__ void store(const Params& params, uint8_t* out, int first, const uint8_t* tile) {
#pragma unroll
  for (int index = threadIdx.x; index < kHeadDim * kWarps; index += kThreads) {
    const int column = index / kWarps;
    const int group = index % kWarps;
    const int key = first + 16 * group;
    if (key < params.seqlen) {
      *reinterpret_cast<uint4*>(out + column * params.values_stride_row + key) =
          *reinterpret_cast<const uint4*>(tile + tile_offset(column, group));
    }
  }
}
