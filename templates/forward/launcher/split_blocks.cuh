  params.split_blocks = std::max(1, int(ceil_div(blocks, kNumSplits)));
