"""KV space as counted by the scheduler: blocks, the prefix index, the ledger. Standard library only; no tensors."""
