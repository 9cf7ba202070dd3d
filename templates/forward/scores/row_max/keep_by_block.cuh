  // Whether both maxima are within the threshold of these.
  __device__ __forceinline__ bool is_close(const float (&top)[2]) const {
    return top[0] - max[0] <= kRescaleThreshold && top[1] - max[1] <= kRescaleThreshold;
  }

  // Takes a row's maximum back that is within the threshold of the one before.
  __device__ __forceinline__ void keep(int r, float before) {
    if (max[r] - before <= kRescaleThreshold) {
      max[r] = before;
    }
  }
