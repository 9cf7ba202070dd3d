  params.tail_blocks = 0;  // all tiles of a head keep step
