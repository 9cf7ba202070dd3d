  cute::cluster_sync();  // the other block may still write here, and arrive at these barriers
