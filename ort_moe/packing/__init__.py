"""Formats of expert weights: from what models hold to what FusedExperts takes, and back, a layer at a time.

One module a format; NumPy and ml_dtypes alone.
"""
