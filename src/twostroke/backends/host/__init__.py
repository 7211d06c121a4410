"""What backends whose tensors live in host memory share: rows, the batch as arrays, sampling, the launch thread."""
