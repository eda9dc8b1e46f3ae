"""The portable forward kernel; start reading at `kernel`."""
