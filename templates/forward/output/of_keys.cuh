  float of_keys[2];  // their share of a row's weights, beside its sink's
