  cute::cluster_sync();
