"""The loop: messages come in, a pass looks, decides and acts."""
