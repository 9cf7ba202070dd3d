  const int64_t section = std::clamp<int64_t>(share / std::max<int64_t>(1, head_bytes), 1, flat_heads);
  params.sections = int((flat_heads - last) / section) + 1;
  params.section_heads = FastDivisor(int(section));
  params.section_tiles = FastDivisor(int(section * n_blocks));
  params.last_section_heads = FastDivisor(int(flat_heads - (params.sections - 1) * section));
