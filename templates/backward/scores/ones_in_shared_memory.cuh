  // Issues what S or dP - delta begins with: ones by the parts of -lse or of -delta, which lie side by side. The second eight of
  // 16 columns are the first again, and multiplied by zeros.
  __device__ __forceinline__ void issue_statistics(Scores& s, int stage, int which) {
    constexpr auto kUnswizzled = cute::SM90::GMMA::LayoutType::INTERLEAVE;
    const uint4* ones = shared.ones + which * 8;
    const uint32_t to_zeros = (sizeof(shared.ones) / 3) * (2 - which);
    fence_operand(s);
    wgmma_fence();
    wgmma_statistics<false>(s, descriptor<0>(reinterpret_cast<const Element*>(ones), kUnswizzled, to_zeros),
                            descriptor<8>(reinterpret_cast<const Element*>(shared.statistics[stage]), kUnswizzled, 0));
  }

