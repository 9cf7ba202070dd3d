  // O += PV, of which the first part is under way; what is to be done meanwhile runs under the second one.
  template <class Meanwhile>
  __device__ __forceinline__ void finish_pv(Output& o, Part& part, Probabilities& p, Meanwhile meanwhile) {
#pragma unroll
    for (int column = 0; column < kOutputColumns; column += kPartColumns) {
      if (column == kPartColumns) {
        meanwhile();
      }
      wgmma_wait<0>();
      add(o, part, column);
      if (column + kPartColumns < kOutputColumns) {
        issue_pv(part, p, column + kPartColumns);
      }
    }
    fence_operand(p);  // whose registers are free only now
    release_v();
  }

  __device__ __forceinline__ void finish_pv(Output& o, Part& part, Probabilities& p) {
    finish_pv(o, part, p, [] {});
  }
