  __device__ __forceinline__ void write(const Tile& tile, const Output& o, const float (&inverse)[2],
                                        const bool (&empty)[2]) {
    constexpr int kHalf = kHeadDimVPadded / 2;  // columns of O that its buffer holds
#pragma unroll
    for (int first = 0; first < kHeadDimVPadded; first += kHalf) {
      write_columns<kHalf>(tile, o, first, inverse, empty);
    }
  }
