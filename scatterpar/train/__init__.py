"""A small training tool on top of the engine, and the example to read: start at
`training.py`.
"""
