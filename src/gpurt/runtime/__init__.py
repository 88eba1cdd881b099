"""The runtime: a backend of any driver. Lanes, order, cancellation, memory, and the one opening of a driver that owns
them all.
"""
