// One warp writes the scales of blocks to shared memory.
