// The gradients of sinks: what the blocks of rows of a head have, in one order.
__global__ void __launch_bounds__(kRowThreads) sum_sinks(const __grid_constant__ Params params) {
  const int head = blockIdx.x;
  const int count = params.m_slots;
  float own = 0.f;
  for (int i = threadIdx.x; i < count; i += kRowThreads) {
    own += params.row_block(head, i).dsink;
  }
  own = sum_of_block(own);
  if (threadIdx.x == 0) {
    params.dsinks[head] = Sink(own);
  }
}
