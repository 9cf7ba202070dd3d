//
// A maximum is over a head. Where it is not given, a kernel of its own reads the tensor to find it.
