"""A server or cluster of Valkey or Redis as a tier."""
