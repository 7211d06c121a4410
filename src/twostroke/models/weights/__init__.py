"""Reading weight files: GGUF and safetensors, memory-mapped, never pickle."""
