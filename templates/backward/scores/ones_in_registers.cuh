  // Issues what S and dP - delta begin with: ones by the parts of -lse and of -delta. Before all other products of a step, since
  // one with registers on the left waits for those under way.
  __device__ __forceinline__ void issue_statistics(Scores& s, Scores& dp) {
    // halves of the 16 columns of core matrices, of which three are parts
    const uint32_t ones = lane() % 4 == 0 ? 0x3f803f80 : lane() % 4 == 1 ? 0x3f80 : 0;
    uint32_t first_half[4] = {ones, ones, 0, 0}, second_half[4] = {0, 0, ones, ones};
    const Descriptor rows = descriptor<16>(reinterpret_cast<const Element*>(shared.statistics[q.stage]),
                                           cute::SM90::GMMA::LayoutType::INTERLEAVE, 128);
    fence_operand(first_half);
    fence_operand(second_half);
    fence_operand(s);
    fence_operand(dp);
    wgmma_fence();
    wgmma_statistics<false>(s, first_half, rows);
    wgmma_statistics<false>(dp, second_half, rows);
  }

