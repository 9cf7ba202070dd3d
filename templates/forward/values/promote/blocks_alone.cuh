  int blocks = -1;  // in O; the first is added after a rescaling
