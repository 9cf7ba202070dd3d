    loader.load_q(tile);  // whose buffer has long been empty, when K's are still held by who is last in the tile before
    loader.load_k(tile, tile.blocks.last - 1);
