  // Tiles that see no key are left to the end, and are no part of the order.
  int m_first = 0;
  params.m_end = m_blocks;
  while (m_first < m_blocks && is_empty(m_first)) {
    ++m_first;
  }
  while (params.m_end > m_first && is_empty(params.m_end - 1)) {
    --params.m_end;
  }
  // The heads of one KV head at a time: who shares K and V loads them at the same time. The last section has more heads,
  // so that short tiles fill up behind its longest ones: as many as the cache holds, within bounds.
  const int64_t seeing = std::max(1, params.m_end - m_first);  // tiles of a head
  const int64_t section = params.heads_per_kv_head.value;
  const int64_t least = ceil_div(int64_t(kSectionRounds) * grid, seeing), most = 4 * least;
  const int64_t last = std::clamp(cached_kv_heads * section, least, most);
  params.sections = 1 + int(std::max<int64_t>(0, flat_heads - last) / section);
  params.section_heads = FastDivisor(int(section));
  params.section_slots = FastDivisor(int(std::min<int64_t>(section * seeing, tiles)));
  params.last_section_heads = FastDivisor(int(flat_heads - (params.sections - 1) * section));
  params.slots = int(flat_heads * (params.m_end - m_first));
  params.tiles = tiles;
