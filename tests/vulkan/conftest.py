"""These tests need Vulkan devices: ``tests/vulkan/run`` makes them. Elsewhere they are
left out.
"""

import os

collect_ignore = [] if "VK_ICD_FILENAMES" in os.environ else ["test_other_devices.py"]
