  // O += PV, all of which is under way; what is to be done meanwhile comes after it. O is rescaled for this P, whatever the next
  // one's row maxima are.
  template <class Meanwhile>
  __device__ __forceinline__ void finish_pv(Output& o, Part& part, Probabilities& p, const float (&rescale)[2],
                                            Meanwhile meanwhile) {
    wgmma_wait<0>();
    add(o, part, 0, rescale);
    fence_operand(p);  // whose registers are free only now
    release_v();
    meanwhile();
  }

  __device__ __forceinline__ void finish_pv(Output& o, Part& part, Probabilities& p, const float (&rescale)[2]) {
    finish_pv(o, part, p, rescale, [] {});
  }
