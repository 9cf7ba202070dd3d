  widen(raw, y);
