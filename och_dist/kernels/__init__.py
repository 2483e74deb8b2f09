"""One block of rows: ndarrays in, values out. Files stand alone and are imported by name: a door would load them all."""
