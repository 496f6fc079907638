"""Examples to batches of fixed shapes: buckets, packed rows, windows."""
