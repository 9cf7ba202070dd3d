  int blocks = 0;  // in O
