"""Tests on devices that other people wrote: ``tests/vulkan/run``."""
