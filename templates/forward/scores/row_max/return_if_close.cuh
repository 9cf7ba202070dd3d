    // Lazy rescaling: a slightly stale maximum is as good. Mostly it is within the threshold in a whole warp,
    // and then nothing is exchanged or rescaled.
    raised = false;
    if (__all_sync(0xffffffff, is_close(top))) {
      return;
    }
    raised = true;
