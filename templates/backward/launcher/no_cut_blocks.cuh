  const int cut_blocks = 0;  // which rows see a tile's keys their number does not tell
