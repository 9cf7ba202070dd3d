    loader.load_k(tile, tile.blocks.last - 1);
    loader.load_q(tile);
