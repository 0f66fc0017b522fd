"""Hosts: how each training engine shards weights, publishes them and yields gradients."""
