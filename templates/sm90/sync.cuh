  __syncthreads();
