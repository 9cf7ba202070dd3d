  // Before the launch before this one is waited for, which had waited for whoever wrote the sinks.
  const float sink = there ? params.sink(head) : 0.0f;
