// What functions of the warps beside the consumers may use of each other: by them dQ is added up in global memory.

// Counters in global memory, of parts of a block's dQ or of tiles that are done: who counts one more has awaited its additions.
void await_additions();
uint32_t acquire(const uint32_t* added);
void await_count(const uint32_t* added, uint32_t count);
bool has_counted(const uint32_t* added, uint32_t count);
void release(uint32_t* added);

// Sums: where those of a block of rows are, whose turn it is to add to them, and how.
float* sums_of(RowBlock& record);
uint32_t* counter_of(RowBlock& record);
int turn_of(const Lengths& lengths, const Tile& tile, int block);
void await_turn(const uint32_t* added, int turn);
void bulk_store(float* to, const float* from, int bytes), bulk_add(float* to, const float* from, int bytes);
void add(float* to, const float* from, int count, int turn);
void end_turn(uint32_t* added, int turn);

// Outputs: dK and dV of a tile, where a thread stores them for the consumers.
void store_gradients(const Params& params, SharedStorage& shared, const Tile& tile, uint32_t phase);
