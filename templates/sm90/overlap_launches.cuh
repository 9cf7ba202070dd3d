  wait_for_launch_before();
  let_next_launch_begin();
