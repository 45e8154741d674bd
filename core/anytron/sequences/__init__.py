"""How ragged batches are arranged for a model: layouts, packing, unpacking, scopes.

Legend of shape suffixes used in this package:

====  ==========================================================================================
T     real tokens of a (micro-)batch, sequences concatenated, no padding ("flat")
B     sequences
R, C  rows and columns of the local model input: thd has R = 1, bshd has R = B
N     slots of one rank, N = R * C (real tokens and padding)
====  ==========================================================================================
"""
