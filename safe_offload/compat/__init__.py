"""What differs between vLLM 0.31, 0.32 and 0.33, by subject, and what is wrapped around its calls.

Imports config and layout. Doors: `base`, `specs` and all others; the rest of us is for any vLLM.
"""
