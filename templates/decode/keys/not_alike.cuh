  const bool alike = false;  // by a mask sequences of one length may see more or less
