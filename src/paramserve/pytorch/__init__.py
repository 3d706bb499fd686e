"""What a worker gives a PyTorch training function: its optimizer and its loader.

The only package here that imports torch at the top of its modules; nothing above imports it before
a training function asks for it.
"""
