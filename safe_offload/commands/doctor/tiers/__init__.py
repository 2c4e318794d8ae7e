"""What doctor finds about tiers: directories, servers, buckets.

Imports tiers and doctor's findings. Door: `check`.
"""
