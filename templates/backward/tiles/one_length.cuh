struct Params;
using Lengths = Params;  // the same for all sequences
