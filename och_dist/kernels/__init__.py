"""One block of rows: ndarrays in, values out.

Files stand alone and are imported by their names: one door would load and compile them all.
"""
