  params.tail_blocks = std::clamp(n_blocks - 1 - seen_by(params, a.seqlen_q - 1).first / (tile_blocks * kBlockN), 0, n_blocks);
