"""Drafting heads as they are published: small networks that read a target model's hidden states and guess its next
tokens. Files become declarations and tensors here; what is computed with them is the backends'."""
