"""Masks and scores as small frozen trees: from text or a function to ranges, numbers and C++.

tree, make: nodes and what builds them; declare: what a call gives; parse, trace: text and functions
in; rules: what a mask or a score may be; canonical: one text and one hash for each; bounds, ranges:
which keys a row sees; evaluate, cpp: numbers and C++ out; scores: what folds into the exponential;
words, pictures: the masks that have names.
"""
