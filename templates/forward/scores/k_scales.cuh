using BlockScales = float[kGroups];  // K's descales of a block
