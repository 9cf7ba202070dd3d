// The sums of a block of rows, and the counter of what has been added to them.
__device__ __forceinline__ float* sums_of(RowBlock& record) { return record.dq; }
__device__ __forceinline__ uint32_t* counter_of(RowBlock& record) { return &record.added; }
