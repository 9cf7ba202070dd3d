  // A section has an even number of rounds, nearly full, so that every block gets as many long tiles as short ones.
  const int64_t cached_heads = cached_kv_heads * params.heads_per_kv_head.value;
  const int64_t two_rounds = 2 * in_round;
  const int64_t pairs = std::max<int64_t>(1, std::min(cached_heads, flat_heads) * rows / two_rounds);
  const int64_t section = std::clamp<int64_t>(pairs * two_rounds / rows, 1, flat_heads);
  params.section_slots = FastDivisor(int(ceil_div(section * rows, two_rounds) * two_rounds));
  params.sections = int(ceil_div(flat_heads, section));
  const int64_t slots = int64_t(params.sections) * params.section_slots.value;
  if (slots > INT32_MAX - grid) {  // each block counts up to one past them
    return kTooMany;
  }
  params.slots = int(slots);
  params.section_heads = FastDivisor(int(section));
  params.last_section_heads = FastDivisor(int(flat_heads - (params.sections - 1) * section));
