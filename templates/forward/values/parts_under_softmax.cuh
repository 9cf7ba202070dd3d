  // O += PV, of which the first part is under way; what is to be done meanwhile runs under the second one. O is rescaled for
  // this P, whatever the next one's row maxima are.
  template <class Meanwhile>
  __device__ __forceinline__ void finish_pv(Output& o, Part& part, Probabilities& p, const float (&rescale)[2],
                                            Meanwhile meanwhile) {
#pragma unroll
    for (int column = 0; column < kOutputColumns; column += kPartColumns) {
      if (column == kPartColumns) {
        meanwhile();
      }
      wgmma_wait<0>();
      add(o, part, column, rescale);
      if (column + kPartColumns < kOutputColumns) {
        issue_pv(part, p, column + kPartColumns);
      }
    }
    fence_operand(p);  // whose registers are free only now
    release_v();
  }

  __device__ __forceinline__ void finish_pv(Output& o, Part& part, Probabilities& p, const float (&rescale)[2]) {
    finish_pv(o, part, p, rescale, [] {});
  }
