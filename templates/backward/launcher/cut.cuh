  // Tiles of rows before the cut begin among the last of the others, which are as long, or behind all of them.
  params.cut_keys = cut_blocks * tile_blocks * kBlockN;
  params.kept_keys = shares > 1 ? a.seqlen_k : params.cut_keys;
  params.flat_shares = int(flat_heads);
  params.first_mixed = n_blocks - cut_blocks;
  params.paired_heads = FastDivisor(std::max(1, int(flat_heads) + (params.first_mixed > 0 ? params.last_section_heads.value : 0)));
  params.first_paired = cut_blocks > 0 ? int(tiles - int64_t(cut_blocks) * params.paired_heads.value) : INT32_MAX;
