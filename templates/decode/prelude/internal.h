// What functions that several roles use may use of each other alone, beside device.h: those that deal units.

// Where a sequence lies in the cache, and how many splits so many keys have.
Sequence sequence_of(const Params& params, int batch);
int splits_of(const Params& params, int length);

// Where a run begins, of parts that are dealt to all runs; a thread block's tile of a group of neighbours.
int begin_of(int run, int parts, int runs);
int tile_of(const Params& params, int group);
int begin_of_whole(const Params& params, int run);
