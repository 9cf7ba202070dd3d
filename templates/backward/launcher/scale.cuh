  // LSEs are divided by it, and of less than that nothing is left of S
  params.scale_log2 = std::max(a.scale, 0x1p-100f) * 1.44269504089f;
