  // O += PV, two parts of it under way: S is done, which leaves registers.
  __device__ __forceinline__ void add_pv(Output& o, Probabilities& p, const Softmax& softmax) {
    Part parts[2];
    issue_pv(parts[0], p, 0);
#pragma unroll
    for (int column = 0; column < kOutputColumns; column += kPartColumns) {
      const int next = column + kPartColumns;
      if (next < kOutputColumns) {
        issue_pv(parts[next / kPartColumns % 2], p, next);
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      add(o, parts[column / kPartColumns % 2], column, softmax.rescale);
    }
    fence_operand(p);  // whose registers are free only now
    release_v();
  }
