  // Issues what dP - delta begins with, S with nothing: ones by the parts of -delta, whose columns lie there once, and count
  // once. Before all other products of a step, since one with registers on the left waits for those under way.
  __device__ __forceinline__ void issue_statistics(Scores&, Scores& dp) {
    const uint32_t ones = lane() % 4 == 0 ? 0x3f803f80 : lane() % 4 == 1 ? 0x3f80 : 0;
    uint32_t left[4] = {ones, ones, 0, 0};
    const Descriptor rows = descriptor<8>(reinterpret_cast<const Element*>(shared.statistics[q.stage]),
                                          cute::SM90::GMMA::LayoutType::INTERLEAVE, 0);
    fence_operand(left);
    fence_operand(dp);
    wgmma_fence();
    wgmma_statistics<false>(dp, left, rows);
  }

