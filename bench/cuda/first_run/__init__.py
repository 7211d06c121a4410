"""An hour with a new card: what of the CUDA backend is younger than its dense bf16 path is checked on it, then
timed. Nothing here imports torch but what is started."""
