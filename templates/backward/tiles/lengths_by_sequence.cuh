using Lengths = Sequence;
