  // The largest score that this thread has in one of its columns.
  __device__ __forceinline__ float largest(const Scores& s, int j) {
    float maximum = -INFINITY;
#pragma unroll
    for (int i = 0; i < 2 * kKeyTiles; ++i) {
      maximum = fmaxf(maximum, s[i / 2][element_at(i, j)]);
    }
    return maximum;
  }

  // How far a score lies above a reference, log2 units. Subtracted first: scores may be large, and their difference is exact
  // where it matters.
  __device__ __forceinline__ float above(float score, float reference) const {
    return (score - reference) * params.scale_log2;
  }

  // Whether a score with this maximum needs another reference.
  __device__ __forceinline__ bool outgrows(float maximum, int j) { return above(maximum, reference[j]) > kRescaleThreshold; }

  __device__ __forceinline__ bool outgrown(const Scores& s) {
    bool any = false;
#pragma unroll
    for (int j = 0; j < kRows / 4; ++j) {
      any |= outgrows(largest(s, j), j);
    }
    return any;
  }

  // P into shared memory; `total` grows by it. Where no key has been seen there is no reference yet.
  __device__ __forceinline__ void exponentiate(const Scores& s, Statistics& total) {
    const int turn = lane() % 8, part = threadIdx.x / 32 * 2 + lane() / 8 % 2;
    char* const to = reinterpret_cast<char*>(shared.p[p]) + turn * kSlab * sizeof(Element) + (part ^ turn) * 16;
#pragma unroll
    for (int group = 0; group < kRows / 8; ++group) {
      float offset[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float own = reference[2 * group + j];
        offset[j] = own == -INFINITY ? 0.0f : own;
      }
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i) {
        float x[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          x[k] = exp2_approx(above(s[i][4 * group + k], offset[k % 2]));
          total[2 * group + k % 2] += x[k];
        }
        store_transposed(to + (i * kRows + group * 8) * kSlab * sizeof(Element), pack(x[0], x[1]), pack(x[2], x[3]));
      }
    }
  }

  // Finds the exact maximum of each column; where it outgrows the reference it takes its place, and what was summed
  // follows. So a column's bits depend on its own scores alone.
  __device__ __forceinline__ void settle(const Scores& s) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < kRows / 4; ++j) {
      float maximum = largest(s, j);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, step));
      }
      if (lane() < 4) {
        shared.maxima[warp][column_at(j)] = maximum;
      }
    }
    meet();
#pragma unroll
    for (int j = 0; j < kRows / 4; ++j) {
      float maximum = -INFINITY;
#pragma unroll
      for (int other = 0; other < kWarps; ++other) {
        maximum = fmaxf(maximum, shared.maxima[other][column_at(j)]);
      }
      if (outgrows(maximum, j)) {
        const float factor = exp2_approx(above(reference[j], maximum));
        reference[j] = maximum;
        sum[j] *= factor;
#pragma unroll
        for (int i = 0; i < 2 * kColumnTiles; ++i) {
          o[i / 2][element_at(i, j)] *= factor;
        }
      }
    }
  }
