  wait_for_launch_before();
