  if (warpgroup == 1) {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    Consumer{params, shared, 0}.run_dv(tile);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    Consumer{params, shared, 1}.run_dk(tile);
  }
