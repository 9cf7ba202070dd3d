//
// The maximum is over the whole tensor. Where it is not given, a kernel of its own reads the tensor to find it.
