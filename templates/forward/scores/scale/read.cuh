    read_scales();
