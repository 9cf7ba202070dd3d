  // The mean of rotated rows is the rotated mean.
  mean = params.signs[column / 32] >> column % 32 & 1 ? -mean : mean;
#pragma unroll 1
  for (int bit = 1; bit < kHadamard; bit *= 2) {
    __syncthreads();
    parts[0][threadIdx.x] = mean;
    __syncthreads();
    const float other = parts[0][threadIdx.x ^ bit];
    mean = column & bit ? other - mean : mean + other;
  }
  mean *= kNorm;
