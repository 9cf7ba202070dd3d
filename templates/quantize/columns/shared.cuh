  // The first rows are on their way while a thread block makes out what it is to know of columns.
  if (pass == 0) {
    share(params, tile, columns);
  }
