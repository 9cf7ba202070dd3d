    if (tile.unit >= 0 && !add_parts(tile, o, softmax)) {
      return;
    }
