  // Writes columns of the warpgroup's rows of O, from column `first` on, through a buffer of so many.
  template <int columns>
  __device__ __forceinline__ void write_columns(const Tile& tile, const Output& o, int first,
                                                const float (&inverse)[2], const bool (&empty)[2]) {
    OutElement* rows = shared.o + warpgroup * kWarpgroupRows * columns;
    const bool leader = threadIdx.x % kWarpgroup == 0;
    if (leader) {
      cute::tma_store_wait<0>();  // what was there before has been read
    }
    barrier_sync(kStore + warpgroup, kWarpgroup);
    round_rows<columns>(rows, o, first, inverse, empty);
    cutlass::arch::fence_view_async_shared();
    barrier_sync(kStore + warpgroup, kWarpgroup);
    if (leader) {
#pragma unroll
      for (int column = 0; column < columns; column += kOSlab) {
        copy_out(tile, rows + column * kWarpgroupRows, first + column);
      }
      cute::tma_store_arrive();
    }
  }
