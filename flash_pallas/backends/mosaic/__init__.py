"""What the GPU backends share: launches, and code written into kernels register by register."""
