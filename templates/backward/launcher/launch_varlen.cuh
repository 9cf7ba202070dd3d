  if (tiles > 0 && !enqueue(attention_backward, grid, kThreads, shared_bytes, stream, params)) {
    return kLaunchFailed;
  }
