"""An hour with a card: everything of the CUDA backend that has run in the interpreter alone is checked on it, then
timed. Nothing here imports torch but what is started."""
