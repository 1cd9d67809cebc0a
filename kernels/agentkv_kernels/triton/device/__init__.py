"""What runs on the device. Every module here imports triton, and compiles a kernel at its first launch."""
