"""Attention for CUDA in Triton. Importing this imports no triton; `backend` does."""
