// What statements of the last kernel may use of each other, beside device.h. Tiles are where it reads and where it writes: a scale
// comes with the second, an output with both.
extern const Params params;
extern const Element* in;
extern const Tile from, to;
extern const int warp;
extern int first;  // of the warp's rows

extern Columns columns;
extern Values y;
extern const float own, scale;  // the maximum of the warp's rows; what values are multiplied by
extern uint8_t* out;
