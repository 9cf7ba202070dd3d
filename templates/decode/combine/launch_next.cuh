  // Few thread blocks of the next call may come before these are combined: each has an SM of its own. Of more, some SMs
  // would have two, and others none.
  params.next_begins = 2 * grid <= multiprocessors;
