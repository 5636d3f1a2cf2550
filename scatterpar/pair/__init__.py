"""DataParallelModel, DataParallelCriterion, gather: outputs and losses stay where they are made.

Users come in here through the package's own names; the engine does not.
"""
