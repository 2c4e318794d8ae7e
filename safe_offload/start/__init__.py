"""What runs before an engine does: registers with vLLM, checks, advises, repeats a refusal last.

Imports config and compat; vLLM loads `plugin` in every process, so it stays light. Door: `plugin`.
"""
