"""Slots and blocks of KV caches."""
