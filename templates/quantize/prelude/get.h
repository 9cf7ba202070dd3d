// What statements of get may use, beside its arguments and device.h: those of the loader work on rows as they came, those of the
// consumer make values of them and change these.
extern const Params params;
extern const Tile tile;
extern Columns columns;
extern const int first, pass;
extern const bool last;
extern Raw raw;
extern Values y;
