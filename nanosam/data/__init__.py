"""Documents to tokens to packed rows to batches."""
