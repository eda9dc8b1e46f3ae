"""Code that the GPU backends share: launches, and kernel code written register by register."""
