  __device__ __forceinline__ void write(const Tile& tile, const Output& o, const float (&inverse)[2],
                                        const bool (&empty)[2]) {
    write_columns<kHeadDimVPadded>(tile, o, 0, inverse, empty);
  }
